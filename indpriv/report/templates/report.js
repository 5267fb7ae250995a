// The report without this script is complete, apart from the search. With it: tables are sorted by
// a click on a column's head, bars tell their counts, and one example can be looked up.
// Texts of the data are only ever set as text, never as markup.
"use strict";
(() => {
  const SVG = "http://www.w3.org/2000/svg";

  function make(tag, text, className) {
    const node = document.createElement(tag);
    if (text !== undefined) node.textContent = text;
    if (className) node.className = className;
    return node;
  }

  function draw(tag, attributes, text) {
    const node = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    if (text !== undefined) node.textContent = text;
    return node;
  }

  // Tables -------------------------------------------------------------------------------------

  // The first number of a cell; a dash is smaller than every number.
  function numberOf(text) {
    const found = text.replaceAll(",", "").replace("−", "-").match(/-?\d+(\.\d+)?(e-?\d+)?/);
    return found ? Number(found[0]) : -Infinity;
  }

  // 1 to 9 before 10, whether cells are numbers or texts with numbers in them.
  const byText = new Intl.Collator("en", { numeric: true }).compare;

  function sortable(table) {
    const body = table.tBodies[0];
    const rows = [...body.rows].filter((row) => !row.classList.contains("total"));
    const heads = [...table.tHead.rows[0].cells];
    if (rows.length < 2) return;
    heads.forEach((head, column) => {
      const button = make("button", undefined, "sort");
      button.type = "button";
      button.title = "Sort by this column";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => sort(head, column));
    });

    // Each click: down for numbers and up for texts first, then the other way, then as written.
    function sort(head, column) {
      const numeric = head.classList.contains("n");
      const orders = numeric ? ["descending", "ascending"] : ["ascending", "descending"];
      const next = orders[orders.indexOf(head.getAttribute("aria-sort")) + 1];
      for (const other of heads) other.removeAttribute("aria-sort");
      let order = rows;
      if (next) {
        head.setAttribute("aria-sort", next);
        const keys = new Map(rows.map((row) => [row, row.cells[column].textContent]));
        const compare = numeric
          ? (a, b) => {
              const [x, y] = [numberOf(keys.get(a)), numberOf(keys.get(b))];
              return x < y ? -1 : Number(x > y);
            }
          : (a, b) => byText(keys.get(a), keys.get(b));
        const sign = next === "ascending" ? 1 : -1;
        order = [...rows].sort((a, b) => sign * compare(a, b));
      }
      const totals = [...body.rows].filter((row) => !rows.includes(row));
      body.append(...order, ...totals);
    }
  }

  // Tooltips -----------------------------------------------------------------------------------

  // A figure's parts of class "tip" have titles, which browsers show late and touch screens never.
  const bubble = make("div", undefined, "bubble");
  bubble.hidden = true;
  document.body.append(bubble);

  function showTip(event) {
    const tip = event.target.closest?.(".tip");
    bubble.hidden = !tip;
    if (!tip) return;
    const title = tip.querySelector("title");
    if (title) {
      tip.dataset.tip = title.textContent;
      title.remove(); // or the browser would show it as well
    }
    bubble.textContent = tip.dataset.tip;
    const room = document.documentElement.clientWidth - bubble.offsetWidth - 8;
    bubble.style.left = `${Math.max(8, Math.min(event.clientX + 12, room))}px`;
    bubble.style.top = `${Math.max(8, event.clientY - bubble.offsetHeight - 12)}px`;
  }

  // Words of the glossary tell their meaning to whoever reaches them by keyboard or touch, too.
  function showMeaning(event) {
    const word = event.target.closest?.("abbr[title]");
    if (!word) return;
    bubble.textContent = word.title;
    bubble.hidden = false;
    const at = word.getBoundingClientRect();
    const room = document.documentElement.clientWidth - bubble.offsetWidth - 8;
    bubble.style.left = `${Math.max(8, Math.min(at.left, room))}px`;
    bubble.style.top = `${at.bottom + 6}px`;
  }

  // A folded section opens when the page is asked for it.
  function openTarget() {
    const target = document.getElementById(location.hash.slice(1));
    const folded = target?.querySelector(":scope > details.section");
    if (!folded || folded.open) return;
    folded.open = true;
    target.scrollIntoView();
  }

  // Search -------------------------------------------------------------------------------------

  function decode(text) {
    return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  }

  function codeAt(coding, position) {
    coding.decoded ??= new DataView(decode(coding.codes).buffer);
    if (coding.bytes === 1) return coding.decoded.getUint8(position);
    if (coding.bytes === 2) return coding.decoded.getUint16(2 * position, true);
    return coding.decoded.getUint32(4 * position, true);
  }

  function positionOf(data, id) {
    if (data.ids !== null) {
      data.positions ??= new Map(data.ids.map((each, position) => [each, position]));
      return data.positions.get(id);
    }
    return /^(0|[1-9]\d*)$/.test(id) && Number(id) < data.n ? Number(id) : undefined;
  }

  function describe(data, id, position) {
    const list = make("dl", undefined, "found");
    const add = (name, text) => list.append(make("dt", name), make("dd", text));
    add("Id", id);
    for (const coding of data.codings) {
      const code = codeAt(coding, position);
      for (const [name, texts] of coding.facts) add(name, texts[code]);
    }
    if (!data.steps.length) return [list];
    return [list, norms(data, position)];
  }

  // Norms at each step shown, as a line between 0 and the clipping norm.
  function norms(data, position) {
    const k = data.steps.length;
    data.decodedNorms ??= decode(data.norms);
    const values = data.decodedNorms.subarray(position * k, (position + 1) * k);
    const x = (i) => 60 + (k > 1 ? (540 * i) / (k - 1) : 270);
    const y = (value) => 100 - 0.8 * Math.min(value, 100);
    const text = (i) =>
      `step ${data.steps[i].toLocaleString("en")}: ` +
      (values[i] >= data.clipped ? "above C, clipped" : `at most ${values[i]} % of C`);
    const all = [...values].map((_, i) => text(i)).join("; ");
    const label = "Gradient norm over training, compared with the clipping norm C";
    const svg = draw("svg", { viewBox: "0 0 620 130", role: "img", class: "norms" });
    svg.setAttribute("aria-label", `${label}. ${all}`);
    for (const [level, name] of [[100, "C"], [50, "C/2"], [0, "0"]]) {
      svg.append(
        draw("line", { x1: 60, x2: 600, y1: y(level), y2: y(level), class: "rule" }),
        draw("text", { x: 48, y: y(level) + 4, "text-anchor": "end" }, name),
      );
    }
    const points = [...values].map((value, i) => `${x(i)},${y(value)}`).join(" ");
    svg.append(draw("polyline", { points, class: "line" }));
    values.forEach((value, i) => {
      const dot = draw("g", { class: "tip" });
      const shape = value >= data.clipped ? "dot clipped" : "dot";
      dot.append(
        draw("title", {}, text(i)),
        draw("circle", { cx: x(i), cy: y(value), r: 12, fill: "none" }),
        draw("circle", { cx: x(i), cy: y(value), r: 4, class: shape }),
      );
      svg.append(dot);
    });
    const ends = k > 1 ? [0, k - 1] : [0];
    for (const i of ends) {
      const step = `step ${data.steps[i].toLocaleString("en")}`;
      const side = k > 1 ? ["start", "end"][Number(i > 0)] : "middle";
      svg.append(draw("text", { x: x(i), y: 124, "text-anchor": side }, step));
    }
    const figure = make("figure");
    figure.append(svg, make("figcaption", `${label}.`));
    return figure;
  }

  function search(box, data) {
    const input = box.querySelector("input");
    const answer = box.querySelector("output");
    const examples = data.ids === null ? `0 to ${data.n - 1}` : data.ids.slice(0, 3).join(", ");
    box.hidden = false;
    input.addEventListener("input", () => {
      const id = input.value.trim();
      const position = positionOf(data, id);
      if (id === "") answer.replaceChildren();
      else if (position !== undefined) answer.replaceChildren(...describe(data, id, position));
      else {
        const kind = data.ids === null ? "Ids are" : "Ids are, for example,";
        const text = `No training ${data.what} has the id “${id}”. ${kind} ${examples}.`;
        answer.replaceChildren(make("p", text, "note"));
      }
    });
  }

  document.querySelectorAll("table").forEach((table) => {
    if (table.tHead) sortable(table);
  });
  document.addEventListener("pointerover", showTip);
  document.addEventListener("pointerdown", showTip);
  document.addEventListener("focusin", showMeaning);
  document.addEventListener("focusout", () => { bubble.hidden = true; });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") bubble.hidden = true; });
  addEventListener("hashchange", openTarget);
  document.querySelector("nav")?.addEventListener("click", () => setTimeout(openTarget));
  openTarget();
  const box = document.getElementById("search");
  if (box) search(box, JSON.parse(document.getElementById("search-data").textContent));
})();
