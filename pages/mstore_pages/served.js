// On a page that a server shows: a search field hides the rows of its table while one types.
(() => {
  const field = document.querySelector("input[data-filters]");
  if (!field) return;
  const table = document.querySelector("table." + field.dataset.filters);
  const told = document.getElementById("found");
  if (!table || !told) return;
  const rows = [...table.tBodies[0].rows];
  const texts = rows.map(row => row.dataset.text ?? row.cells[0].textContent.toLowerCase());
  const first = told.textContent;
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/).filter(word => word);
    let count = 0;
    rows.forEach((row, number) => {
      row.hidden = !words.every(word => texts[number].includes(word));
      if (!row.hidden) count += 1;
    });
    told.textContent = words.length ? `${count} of the ${rows.length} on this page. Enter searches all.` : first;
  });
})();
