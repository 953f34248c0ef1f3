"use strict";
document.querySelectorAll("table.sortable").forEach(table => {
  const value = (row, i) => row.cells[i].dataset.sort ?? row.cells[i].textContent.trim();
  const order = new Intl.Collator("en", {numeric: true}).compare;
  table.querySelectorAll("th button").forEach(button => button.addEventListener("click", () => {
    const head = button.parentElement;
    const up = head.getAttribute("aria-sort") !== "ascending";
    table.querySelectorAll("th").forEach(th => th.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const rows = Array.from(table.tBodies[0].rows);
    const compare = (a, b) => {
      const [p, q] = [value(a, head.cellIndex), value(b, head.cellIndex)];
      if (p === "" || q === "") return (p === "") - (q === "");  // rows without a number stay last
      const numbers = [Number(p), Number(q)];
      const difference = numbers.some(Number.isNaN) ? order(p, q) : numbers[0] - numbers[1];
      return up ? difference : -difference;
    };
    rows.sort(compare).forEach(row => table.tBodies[0].append(row));
  }));
});
