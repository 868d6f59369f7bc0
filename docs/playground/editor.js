"use strict";
// A text field with line numbers, colored words, and marks under mistakes.
//
//   commplan.editor({ words, change, hover })
//     words    { keywords, values }, lists of the language
//     change   called with the text, after each change
//     hover    called with the line that the caret or the pointer is in
//     gives    { element, text(), set(text), mark(diagnostics), highlight(line), go(line, column) }
(() => {
  const { html } = commplan;

  commplan.editor = ({ words, change, hover }) => {
    const pattern = new RegExp(`(#.*$)|\\b(${words.keywords.join("|")})\\b|\\b(${words.values.join("|")})\\b|(\\b\\d[\\d_.]*)`, "g");
    const kinds = ["comment", "word", "value", "digits"];
    const area = html("textarea", {
      class: "editor-text",
      spellcheck: "false",
      autocapitalize: "off",
      autocomplete: "off",
      wrap: "off",
      "aria-label": "text of the plan",
      oninput: () => {
        draw();
        change(area.value);
      },
      onkeydown: (event) => {
        if (event.key !== "Tab" || event.shiftKey || event.ctrlKey) return;
        if (leaving) return;
        event.preventDefault();
        document.execCommand("insertText", false, "    ");
      },
      onscroll: () => follow(),
      onclick: () => hover(lineOf(area.selectionStart)),
      onkeyup: (event) => {
        leaving = event.key === "Escape"; // Escape, then Tab leaves the field
        hover(lineOf(area.selectionStart));
      },
    });
    const shown = html("pre", { class: "editor-shown", "aria-hidden": "true" });
    const numbers = html("pre", { class: "editor-numbers", "aria-hidden": "true" });
    const element = html("div", { class: "editor" }, numbers, html("div", { class: "editor-field" }, shown, area));
    let marks = [];
    let active = 0;
    let leaving = false;

    const lineOf = (place) => area.value.slice(0, place).split("\n").length;

    function colored(text) {
      const parts = [];
      let end = 0;
      for (const match of text.matchAll(pattern)) {
        parts.push(text.slice(end, match.index));
        const kind = kinds[match.slice(1).findIndex(Boolean)];
        parts.push(html("span", { class: `code-${kind}` }, match[0]));
        end = match.index + match[0].length;
      }
      return [...parts, text.slice(end)];
    }

    // Underlines of one line, as an empty text over it.
    function underlined(line, text) {
      const own = marks.filter(({ span }) => span && span.line <= line && line <= span.end_line);
      return own.map(({ span, severity }) => {
        const from = span.line === line ? span.column - 1 : 0;
        const to = span.end_line === line ? Math.max(span.end_column - 1, from + 1) : Math.max(text.length, 1);
        const mark = html("span", { class: `editor-mark ${severity}` });
        mark.style.left = `${from}ch`;
        mark.style.width = `${to - from}ch`;
        return mark;
      });
    }

    function draw() {
      const lines = area.value.split("\n");
      shown.replaceChildren(
        ...lines.map((text, index) =>
          html(
            "div",
            { class: `editor-line${index + 1 === active ? " active" : ""}` },
            colored(text),
            text ? null : "\u200b",
            underlined(index + 1, text),
          ),
        ),
      );
      const wrong = new Set(marks.filter(({ span }) => span).map(({ span }) => span.line));
      numbers.replaceChildren(
        ...lines.map((_, index) => html("div", { class: wrong.has(index + 1) ? "wrong" : null }, String(index + 1))),
      );
      follow();
    }

    function follow() {
      shown.style.transform = `translate(${-area.scrollLeft}px, ${-area.scrollTop}px)`;
      numbers.style.transform = `translateY(${-area.scrollTop}px)`;
    }

    return {
      element,
      text: () => area.value,
      set(text) {
        area.value = text;
        marks = [];
        draw();
      },
      mark(diagnostics) {
        marks = diagnostics;
        draw();
      },
      highlight(line) {
        if (line === active) return;
        active = line;
        draw();
      },
      go(line, column) {
        const lines = area.value.split("\n");
        const place = lines.slice(0, line - 1).reduce((sum, text) => sum + text.length + 1, 0) + column - 1;
        area.focus();
        area.setSelectionRange(place, place);
        area.scrollTop = Math.max(0, (line - 4) * 20);
      },
    };
  };
})();
