// Name each cell of a wide table after its column: site.css shows the names on narrow pages.
const LINE = 40; // letters of a line on a telephone
const LONGEST = 16; // letters after which a cell can wrap without harm

document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("table.docutils")) {
    const columns = [...table.querySelectorAll("thead th")].map((cell) => cell.textContent.trim());
    const widths = columns.map((title) => Math.min(title.length, LONGEST));
    const rows = [...table.querySelectorAll("tbody tr")].map((row) => [...row.children]);
    for (const row of rows) {
      row.forEach((cell, at) => (widths[at] = Math.max(widths[at], Math.min(cell.textContent.trim().length, LONGEST))));
    }
    if (widths.reduce((sum, width) => sum + width, 0) <= LINE) continue;
    table.classList.add("wide");
    for (const row of rows) row.forEach((cell, at) => (cell.dataset.column = columns[at]));
  }
});
