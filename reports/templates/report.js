"use strict";
// Sorting and filtering of the table of cases; the page is complete without it.
(() => {
  const table = document.getElementById("cases");
  const form = document.getElementById("filter");
  if (!table || !form) return;
  const body = table.tBodies[0];
  const rows = Array.from(body.rows);
  const key = (row, column) => row.cells[column].dataset.v;
  const compare = (a, b) => {
    if (a === "" || b === "") return (a === "") - (b === "");
    const x = Number(a), y = Number(b);
    return Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b) : x - y;
  };
  Array.from(table.tHead.rows[0].cells).forEach((head, column) => {
    const sort = () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const sorted = rows.slice().sort((a, b) => {
        const x = key(a, column), y = key(b, column);
        const order = compare(x, y);
        return down && x !== "" && y !== "" ? -order : order;
      });
      body.append(...sorted);
    };
    head.setAttribute("role", "button");
    head.tabIndex = 0;
    head.addEventListener("click", sort);
    head.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(); });
  });
  const [search, only] = form.querySelectorAll("input");
  const show = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = (only.checked && row.classList.contains("good")) || !words.every((word) => text.includes(word));
      shown += !row.hidden;
    }
    form.querySelector("output").textContent = shown === rows.length ? "" : `${shown} of ${rows.length}`;
  };
  form.addEventListener("input", show);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.hidden = false;
})();
