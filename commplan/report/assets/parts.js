"use strict";
// Elements that several panels use: remarks, lists, tables, and buttons that mark a line.
(() => {
  const { html } = commplan;

  const percent = (part) => `${Math.round(part * 100)}%`;
  const plural = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
  const busiest = (nbytes) => Object.entries(nbytes).filter(([, size]) => size);
  const leftOut = (text) => (text ? html("p", { class: "left-out" }, `${text}.`) : null);
  const remark = (text) => html("p", { class: "remark" }, ticked(text));
  // `text` as nodes, with parts between backticks as code.
  const ticked = (text) => text.split("`").map((part, index) => (index % 2 ? html("code", {}, part) : part));
  // A list of sentences. Those that begin with spaces are indented; rows of a table keep their alignment.
  const sentences = (texts, kind) =>
    html(
      "ul",
      { class: kind },
      texts.map((text) => {
        const columns = /^ .*\S {2,}\S/.test(text);
        return html(
          "li",
          { class: `${text.startsWith(" ") ? "inner" : ""}${columns ? " columns" : ""}` },
          columns ? text : ticked(text),
        );
      }),
    );

  // A table in a scrollable frame. A head is a text, or { text, number } for a column of numbers.
  function table(heads, rows, { label }) {
    return html(
      "div",
      { class: "table-frame", tabindex: 0, role: "region", "aria-label": label },
      html(
        "table",
        {},
        html(
          "thead",
          {},
          html(
            "tr",
            {},
            heads.map((head) =>
              html("th", { scope: "col", class: head.number ? "number" : null }, head.text || head),
            ),
          ),
        ),
        html("tbody", {}, rows),
      ),
    );
  }

  const cell = (text, number) => html("td", { class: number ? "number" : null }, text);

  // A line number as a button that marks everything of its line; a dash for line 0.
  function lineButton(line, selection) {
    if (!line) return html("span", {}, "–");
    const button = html(
      "button",
      {
        type: "button",
        class: "line-button",
        "aria-label": `line ${line}`,
        onmouseenter: () => selection.hover(line),
        onmouseleave: () => selection.hover(0),
        onfocus: () => selection.hover(line),
        onblur: () => selection.hover(0),
        onclick: () => selection.pick(line),
      },
      String(line),
    );
    selection.listen((active) => button.classList.toggle("active", active === line));
    return button;
  }

  commplan.parts = { percent, plural, busiest, leftOut, remark, ticked, sentences, table, cell, lineButton };
})();
