"use strict";
// Functions that all components use. `commplan` is the only global name of the page.
//
//   commplan.html(tag, attributes, ...children)   an HTML element; `on..` attributes are listeners
//   commplan.svg(tag, attributes, ...children)    an SVG element
//   commplan.bytes(n), commplan.seconds(s)        texts such as `25 MiB` and `3.2 ms`, as the command prints them
//   commplan.rate(n)                              a text such as `25 GB/s`, from bytes per second
//   commplan.textWidth(text, font)                the width of a text, in pixels
//   commplan.fitted(text, width, font)            `text`, shortened to `width` pixels
//   commplan.onEnter(act)                         a keydown listener that calls act(event) for Enter and space
//   commplan.tooltip                              one box: show(rows, rect) below the rectangle, and hide();
//                                                 rows are [name, text], or [null, title]
//
// Children that are null, undefined or false are omitted; strings become text, never markup.
const commplan = {};

(() => {
  const SVG = "http://www.w3.org/2000/svg";

  // Sets attributes and listeners of `node`, appends children, and returns it.
  function filled(node, attributes, children) {
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value === null || value === undefined || value === false) continue;
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else node.setAttribute(name, value === true ? "" : value);
    }
    node.append(
      ...children.flat().filter((child) => child !== null && child !== undefined && child !== false),
    );
    return node;
  }

  commplan.html = (tag, attributes, ...children) => filled(document.createElement(tag), attributes, children);
  commplan.svg = (tag, attributes, ...children) =>
    filled(document.createElementNS(SVG, tag), attributes, children);

  // `number` in the largest of `units` ([name, size]) that does not exceed it, with three digits; null if all do.
  function inUnits(number, units) {
    for (const [unit, scale] of units) {
      if (number >= scale) {
        const scaled = number / scale;
        return `${scaled < 1000 ? Number(scaled.toPrecision(3)) : Math.round(scaled)} ${unit}`;
      }
    }
    return null;
  }

  commplan.bytes = (nbytes) =>
    inUnits(nbytes, [
      ["GiB", 2 ** 30],
      ["MiB", 2 ** 20],
      ["KiB", 2 ** 10],
    ]) || `${Math.round(nbytes)} B`;
  commplan.seconds = (seconds) =>
    seconds
      ? inUnits(seconds, [
          ["s", 1],
          ["ms", 1e-3],
          ["us", 1e-6],
        ]) || `${Number((seconds * 1e9).toPrecision(3))} ns`
      : "0";
  commplan.rate = (perSecond) =>
    `${
      inUnits(perSecond, [
        ["GB/s", 1e9],
        ["MB/s", 1e6],
        ["kB/s", 1e3],
      ]) || `${perSecond} B/s`
    }`;

  const pen = document.createElement("canvas").getContext("2d");
  const widths = new Map(); // measured widths, by font and text
  commplan.textWidth = (text, font) => {
    const key = `${font}|${text}`;
    if (!widths.has(key)) {
      pen.font = font;
      widths.set(key, pen.measureText(text).width);
    }
    return widths.get(key);
  };

  // `text`, shortened with an ellipsis to at most `width` pixels; "" if not even one letter fits.
  commplan.fitted = (text, width, font) => {
    if (commplan.textWidth(text, font) <= width) return text;
    const letter = commplan.textWidth("n", font);
    let cut = Math.min(text.length - 1, Math.floor(width / letter) + 4);
    while (cut > 0 && commplan.textWidth(`${text.slice(0, cut)}…`, font) > width) cut -= 1;
    return cut > 0 ? `${text.slice(0, cut)}…` : "";
  };

  // Enter and space do what a click does.
  commplan.onEnter = (act) => (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    act(event);
  };

  let box = null;
  commplan.tooltip = {
    show(rows, rect) {
      if (!box) {
        box = commplan.html("div", { class: "tooltip", role: "tooltip", id: "tooltip" });
        document.body.append(box);
      }
      const { html } = commplan;
      box.replaceChildren(
        ...rows.map(([name, text]) =>
          name
            ? html("div", { class: "tip-row" }, html("span", {}, name), html("span", {}, text))
            : html("div", { class: "tip-title" }, text),
        ),
      );
      box.hidden = false;
      const { width, height } = box.getBoundingClientRect();
      const room = document.documentElement.clientWidth - width - 8;
      const left = Math.max(8, Math.min(rect.left + rect.width / 2 - width / 2, room));
      const below = rect.bottom + 8 + height < window.innerHeight || rect.top < height + 8;
      box.style.left = `${left + window.scrollX}px`;
      box.style.top = `${(below ? rect.bottom + 8 : rect.top - height - 8) + window.scrollY}px`;
    },
    hide() {
      if (box) box.hidden = true;
    },
  };
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") commplan.tooltip.hide();
  });
})();
