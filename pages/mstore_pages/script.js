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

  // As heatmap.py packs them: each is a place among the numbers in use, which have three digits.
  function unpacked(text, {letters, low, decades, steps}) {
    const known = [null, 0], all = 900 * decades;
    let code = 0;
    for (const step of steps) {
      code += step;
      const n = code % all;
      known.push(Number(`${code < all ? "" : "-"}${100 + n % 900}e${low + Math.floor(n / 900)}`));
    }
    text = text.replace(/(.)~(\d+)\./g, (_, letter, count) => letter.repeat(count));
    const values = [];
    for (let at = 0; at < text.length; at += letters) {
      let place = 0;
      for (const letter of text.slice(at, at + letters)) place = place * 64 + ALPHABET.indexOf(letter);
      values.push(known[place]);
    }
    return values;
  }

  function percent(value) {
    if (value === null) return "\u2013";
    const text = String(Number((100 * value).toPrecision(3)));
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
    for (const option of measure.options) option.dataset.name = option.textContent;

    function offer() {
      // Of the result, only its change and equal blocks are known.
      for (const option of measure.options) {
        option.disabled = data.kinds.every(kind => kind[option.value][model.value] === null);
        option.textContent = option.dataset.name + (option.disabled ? " (choose an expert first)" : "");
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
            cell.textContent = percent(value);
            cell.className = classOf(value, chosen) ?? "";
          });
        });
        return values;
      });
      const what = model.selectedOptions[0].textContent + ": "
        + measure.selectedOptions[0].dataset.name;
      document.querySelectorAll(".map-title").forEach(one => { one.textContent = what; });
    }

    function tell(number, row, at) {
      const kind = data.kinds[number], across = kind.layers.length;
      if (at < 0 || at >= across) return;
      const where = kind.layers[at] === "" ? "" : `${kind.kind} ${kind.layers[at]}, `;
      readout.textContent = `${where}${kind.parts[row]}: ${percent(shown[number][row * across + at])}`;
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

  // A picture that is wider than the window shows its subject first.
  function shows(box) {
    const place = box.closest(".scroll"), right = box.getBoundingClientRect().right;
    if (place) place.scrollLeft = right - place.getBoundingClientRect().right + 16;
  }

  document.querySelectorAll("table.sortable").forEach(sorts);
  document.querySelectorAll(".chosen-box").forEach(shows);
  document.querySelectorAll("button[data-of]").forEach(copies);
  const source = document.getElementById("map-data");
  if (source) maps(source);
})();
