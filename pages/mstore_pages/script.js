"use strict";
// What a page can do beyond being read: sort tables, choose what the map shows, copy the recipe.
// Without it everything is there, too.
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";

  function sorts(table) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const isNumber = head.classList.contains("n");
        const before = head.getAttribute("aria-sort");
        const order = before ? (before === "ascending" ? "descending" : "ascending")
          : isNumber ? "descending" : "ascending";
        const sign = order === "ascending" ? 1 : -1;
        const value = row => {
          const cell = row.cells[column];
          if (!isNumber) return cell.textContent;
          return cell.dataset.v === undefined ? -Infinity : Number(cell.dataset.v);
        };
        const rows = [...table.tBodies[0].rows].sort((a, b) => {
          const one = value(a), other = value(b);
          if (one === other) return 0;
          if (isNumber) return sign * (one < other ? -1 : 1);
          return sign * one.localeCompare(other, undefined, {numeric: true});
        });
        heads.forEach(one => one.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", order);
        table.tBodies[0].append(...rows);
      });
    });
  }

  function copies(button) {
    button.hidden = false;
    button.addEventListener("click", async () => {
      const text = document.getElementById(button.dataset.of);
      try {
        await navigator.clipboard.writeText(text.textContent);
        button.textContent = "Copied";
      } catch {
        // A page from a file may not write the clipboard: the text is selected instead.
        const range = document.createRange();
        range.selectNodeContents(text);
        getSelection().removeAllRanges();
        getSelection().addRange(range);
        button.textContent = "Selected: press Ctrl+C";
      }
    });
  }

  function unpacked(text, packing) {
    const values = [];
    if (packing.is_short) {
      for (const letter of text) {
        const step = ALPHABET.indexOf(letter);
        values.push(step === 0 ? null : (step - 1) / 62);
      }
      return values;
    }
    for (let at = 0; at < text.length; at += 2) {
      const step = ALPHABET.indexOf(text[at]) * 64 + ALPHABET.indexOf(text[at + 1]);
      const part = (step - 2) / 4093;
      if (step === 0) values.push(null);
      else if (step === 1) values.push(0);
      else if (packing.is_log) values.push(packing.low * (packing.high / packing.low) ** part);
      else values.push(packing.low + (packing.high - packing.low) * part);
    }
    return values;
  }

  function told(value, measure) {
    // A short packing rounds all but nothing and everything.
    if (!measure.packing.is_short || value === null || value === 0 || value === 1) {
      return percent(value);
    }
    return "~ " + percent(Math.round(100 * value) / 100);
  }

  function percent(value) {
    if (value === null) return "\u2013";
    const scaled = 100 * value, size = Math.abs(scaled);
    const text = size >= 100 ? scaled.toFixed(0) : size < 5e-5 ? "0" : String(Number(scaled.toPrecision(3)));
    return text.replaceAll("-", "\u2212") + "\u00a0%";
  }

  function classOf(value, measure) {
    if (value === null) return null;
    let at = 0;
    while (at < measure.edges.length && measure.edges[at] <= value) at += 1;
    return measure.classes[at];
  }

  function maps(source) {
    const data = JSON.parse(source.textContent);
    const form = document.getElementById("map-selector");
    const model = form.elements.model, measure = form.elements.measure;
    const readout = document.getElementById("map-readout");
    const boxes = [...document.querySelectorAll(".map")];
    let shown = [];

    function offer() {
      // Of the result, only its change and equal blocks are known.
      for (const option of measure.options) {
        option.disabled = data.kinds.every(kind => kind[option.value][model.value] === null);
      }
      if (measure.selectedOptions[0].disabled) measure.value = "change";
    }

    function draw() {
      offer();
      const chosen = data.measures[measure.value];
      document.querySelectorAll(".map-legend").forEach(one => {
        one.hidden = one.id !== "legend-" + measure.value;
      });
      shown = data.kinds.map((kind, number) => {
        const text = kind[measure.value][model.value];
        const across = kind.layers.length;
        const values = text === null ? Array(across * kind.parts.length).fill(null)
          : unpacked(text, chosen.packing);
        const strips = boxes[number].querySelectorAll(".strip");
        strips.forEach((strip, row) => {
          strip.querySelectorAll("path").forEach(one => one.remove());
          const drawn = new Map();
          for (let at = 0; at < across; at += 1) {
            const name = classOf(values[row * across + at], chosen);
            if (name) drawn.set(name, (drawn.get(name) ?? "") + `M${at} 0h1v1h-1z`);
          }
          for (const [name, d] of drawn) {
            const path = document.createElementNS(SVG, "path");
            path.setAttribute("class", name);
            path.setAttribute("d", d);
            strip.lastElementChild.append(path);
          }
        });
        const table = document.getElementById("map-table-" + number);
        [...table.tBodies[0].rows].forEach((row, layer) => {
          [...row.cells].slice(1).forEach((cell, part) => {
            const value = values[part * across + layer];
            cell.textContent = told(value, chosen);
            cell.className = classOf(value, chosen) ?? "";
          });
        });
        return values;
      });
      const what = model.selectedOptions[0].textContent + ": "
        + measure.selectedOptions[0].textContent;
      document.querySelectorAll(".map-title").forEach(one => { one.textContent = what; });
    }

    function tell(number, row, at) {
      const kind = data.kinds[number], across = kind.layers.length;
      if (at < 0 || at >= across) return;
      const where = kind.layers[at] === "" ? "" : `${kind.kind} ${kind.layers[at]}, `;
      readout.textContent = `${where}${kind.parts[row]}: ${told(shown[number][row * across + at], data.measures[measure.value])}`;
    }

    boxes.forEach((box, number) => {
      let row = 0, at = 0;
      const kind = data.kinds[number], wide = Math.max(kind.layers.length, data.least);
      box.querySelectorAll(".strip").forEach((strip, one) => {
        strip.addEventListener("pointermove", event => {
          const place = strip.getBoundingClientRect();
          tell(number, one, Math.floor((event.clientX - place.left) / place.width * wide));
        });
      });
      box.tabIndex = 0;
      box.setAttribute("role", "group");
      box.setAttribute("aria-label", kind.kind + ": arrow keys read the cells");
      box.addEventListener("keydown", event => {
        const [down, right] = {ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1],
          ArrowRight: [0, 1]}[event.key] ?? [0, 0];
        if (!down && !right) return;
        event.preventDefault();
        row = Math.min(kind.parts.length - 1, Math.max(0, row + down));
        at = Math.min(kind.layers.length - 1, Math.max(0, at + right));
        tell(number, row, at);
      });
    });
    form.hidden = false;
    form.addEventListener("change", draw);
    form.addEventListener("submit", event => event.preventDefault());
    draw();
  }

  document.querySelectorAll("table.sortable").forEach(sorts);
  document.querySelectorAll("button[data-of]").forEach(copies);
  const source = document.getElementById("map-data");
  if (source) maps(source);
})();
