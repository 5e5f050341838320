// Sorts a table of class `sortable` by the column whose button is clicked.
"use strict";
for (const table of document.querySelectorAll("table.sortable")) {
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => heading.querySelector("button")?.addEventListener("click", () => {
    const sign = heading.ariaSort === "descending" ? 1 : -1;
    for (const other of headings) other.ariaSort = null;
    heading.ariaSort = sign > 0 ? "ascending" : "descending";
    const value = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent.trim();
    const rows = [...table.tBodies[0].rows].sort((a, b) => {
      const [x, y] = [value(a), value(b)], [m, n] = [Number(x), Number(y)];
      if (!Number.isNaN(m) && !Number.isNaN(n)) return sign * (m - n);
      // Numbers before dashes, whichever way the numbers go.
      if (Number.isNaN(m) !== Number.isNaN(n)) return Number.isNaN(m) ? 1 : -1;
      return sign * x.localeCompare(y);
    });
    table.tBodies[0].append(...rows);
  }));
}
