"use strict";
// Pieces that panels are made of: remarks, lists, tables, and the buttons that mark a line.
(() => {
  const { html } = commplan;

  const percent = (part) => `${Math.round(part * 100)}%`;
  const plural = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
  const busiest = (nbytes) => Object.entries(nbytes).filter(([, size]) => size);
  const leftOut = (text) => (text ? html("p", { class: "left-out" }, `${text}.`) : null);
  const remark = (text) => html("p", { class: "remark" }, ticked(text));
  // What stands between backticks is code.
  const ticked = (text) => text.split("`").map((part, index) => (index % 2 ? html("code", {}, part) : part));
  // A list of sentences; those that begin with spaces belong to the one before, columns keep their places.
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

  // A line number that marks what belongs to its line.
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
