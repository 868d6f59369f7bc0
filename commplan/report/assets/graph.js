"use strict";
// The graph of a plan's phase: stages as boxes, and values as labels between them.
//
//   commplan.graph(graph, { hover, pick })
//     graph    { title, nodes: [{ id, kind, texts, line }], left_out,
//                edges: [{ tail, head, texts, line, back }] }
//              kind: source, input, state, host, device, network or output. texts: lines, the first one bold.
//              Edges with the same tail and texts are one value; edges with `back` are dashed. line: the plan
//              line, or 0 for none.
//     hover    called with a line when a stage or value is pointed at or focused, and with 0 when that ends
//     pick     called with a line when a stage or value is clicked, or Enter is pressed on a stage
//     returns  { element, highlight(line) }: highlight marks the boxes and edges of a line; 0 marks none
(() => {
  const { html, svg, textWidth } = commplan;
  const STRONG = "600 13px system-ui, sans-serif";
  const PLAIN = "12px system-ui, sans-serif";
  const WIDEST = 220; // pixels of a text before it is wrapped
  const LINE = 17; // pixels from one line of text to the next
  const MARGIN = 10; // pixels around the picture
  const ROOM = 760; // pixels of a row of disconnected parts, before a new row starts
  const APART = 22; // pixels between disconnected parts
  let arrows = 0; // number of graphs so far: the id of each arrow marker must be unique in the page

  commplan.graph = (graph, { hover = () => {}, pick = () => {} } = {}) => {
    const values = new Map();
    const links = [];
    for (const edge of graph.edges) {
      if (!edge.texts.length) {
        links.push({ tail: edge.tail, head: edge.head });
        continue;
      }
      const id = `${edge.tail}: ${edge.texts.join("\n")}`;
      if (!values.has(id)) {
        values.set(id, { id, kind: "value", texts: edge.texts, line: edge.line });
        links.push({ tail: edge.tail, head: id });
      }
      links.push({ tail: id, head: edge.head, back: edge.back });
    }
    const nodes = [...graph.nodes, ...values.values()].map(measured);
    const { width, height, at, paths } = parts(nodes, links);
    const shapes = [];
    const arrow = `arrow-${(arrows += 1)}`;
    const lines = new Map(nodes.map((node) => [node.id, node.line]));
    const drawn = paths.map((place, index) => {
      const { tail, head, back } = links[index];
      const ends = values.has(head) ? {} : { "marker-end": `url(#${arrow})` };
      const path = svg("path", { ...place, class: back ? "edge back" : "edge", ...ends });
      shapes.push([lines.get(values.has(head) ? head : tail), path]);
      return path;
    });
    const boxes = nodes.map((node) => {
      const box = drawnNode(node, at.get(node.id), hover, pick);
      shapes.push([node.line, box]);
      return box;
    });
    const picture = svg(
      "svg",
      {
        class: "graph",
        role: "group",
        "aria-label": `graph of ${graph.title}`,
        width: width + 2 * MARGIN,
        height: height + 2 * MARGIN,
        viewBox: `${-MARGIN} ${-MARGIN} ${width + 2 * MARGIN} ${height + 2 * MARGIN}`,
      },
      svg(
        "defs",
        {},
        svg(
          "marker",
          {
            id: arrow,
            viewBox: "0 0 8 8",
            refX: 7,
            refY: 4,
            markerWidth: 10,
            markerHeight: 10,
            markerUnits: "userSpaceOnUse",
            orient: 90,
          },
          svg("path", { d: "M0 0L8 4L0 8z", class: "arrowhead" }),
        ),
      ),
      drawn,
      boxes,
    );
    const element = html(
      "figure",
      { class: "graph-figure" },
      html("figcaption", {}, graph.title),
      picture,
      graph.left_out ? html("p", { class: "left-out" }, graph.left_out) : null,
    );
    return {
      element,
      highlight(line) {
        picture.classList.toggle(
          "dimmed",
          shapes.some(([own]) => line && own === line),
        );
        for (const [own, shape] of shapes) shape.classList.toggle("active", Boolean(line) && own === line);
      },
    };
  };

  // Lays out each connected part of the graph, and arranges the parts in rows.
  // Returns { width, height, at: id -> center, paths: for each link its { d, transform } }.
  function parts(nodes, links) {
    const near = new Map(nodes.map((node) => [node.id, []]));
    links.forEach(({ tail, head }) => {
      near.get(tail).push(head);
      near.get(head).push(tail);
    });
    const part = new Map();
    let count = 0;
    for (const { id } of nodes) {
      if (part.has(id)) continue;
      const open = [id];
      part.set(id, count);
      while (open.length) {
        for (const next of near.get(open.pop())) {
          if (!part.has(next)) {
            part.set(next, count);
            open.push(next);
          }
        }
      }
      count += 1;
    }
    const whole = { width: 0, height: 0, at: new Map(), paths: new Array(links.length) };
    let [x, y, tall] = [0, 0, 0];
    for (let number = 0; number < count; number += 1) {
      const own = links.flatMap((link, index) => (part.get(link.tail) === number ? [index] : []));
      const laid = commplan.layered(
        nodes.filter((node) => part.get(node.id) === number),
        own.map((index) => links[index]),
      );
      if (x && x + laid.width > ROOM) [x, y, tall] = [0, y + tall + APART, 0];
      laid.at.forEach((place, id) => whole.at.set(id, { x: place.x + x, y: place.y + y }));
      own.forEach((index, i) => {
        whole.paths[index] = { d: laid.paths[i], transform: `translate(${x} ${y})` };
      });
      whole.width = Math.max(whole.width, x + laid.width);
      whole.height = Math.max(whole.height, y + laid.height);
      x += laid.width + APART;
      tall = Math.max(tall, laid.height);
    }
    return whole;
  }

  // The lines of a text that is wrapped at spaces, except before a closing brace.
  function wrapped(text, font) {
    const rows = [];
    let row = "";
    for (const word of text.replace(/ }$/, "\u00a0}").split(" ")) {
      const longer = row ? `${row} ${word}` : word;
      if (row && textWidth(longer, font) > WIDEST) {
        rows.push(row);
        row = word;
      } else {
        row = longer;
      }
    }
    return [...rows, row].map((each) => commplan.fitted(each, WIDEST + 40, font));
  }

  // A node with its wrapped lines (`rows`), width and height.
  function measured(node) {
    const strong = node.kind === "value" ? PLAIN : STRONG;
    const rows = node.texts.flatMap((text, index) =>
      wrapped(text, index ? PLAIN : strong).map((row) => ({ row, first: index === 0 })),
    );
    const wide = Math.max(...rows.map(({ row, first }) => textWidth(row, first ? strong : PLAIN)));
    const value = node.kind === "value";
    return {
      ...node,
      rows,
      width: Math.ceil(wide) + (value ? 18 : 26),
      height: rows.length * LINE + (value ? 8 : 16),
    };
  }

  // The SVG element of a measured node with its center at x, y.
  function drawnNode(node, { x, y }, hover, pick) {
    const left = x - node.width / 2;
    const top = y - node.height / 2;
    const texts = node.rows.map(({ row, first }, index) =>
      svg(
        "text",
        { x, y: y + (index - (node.rows.length - 1) / 2) * LINE, class: first ? "first" : "more" },
        row,
      ),
    );
    const line = node.line ? `, line ${node.line}` : "";
    const stage = node.kind !== "value";
    const active =
      stage && node.line
        ? {
            tabindex: 0,
            role: "button",
            onfocus: () => hover(node.line),
            onblur: () => hover(0),
            onkeydown: commplan.onEnter(() => pick(node.line)),
          }
        : { role: "img" };
    return svg(
      "g",
      {
        class: `node kind-${node.kind}`,
        "aria-label": `${node.texts.join(", ")}${line}`,
        ...active,
        onmouseenter: () => hover(node.line),
        onmouseleave: () => hover(0),
        onclick: () => node.line && pick(node.line),
      },
      svg("rect", {
        x: left,
        y: top,
        width: node.width,
        height: node.height,
        rx: node.kind === "value" ? 10 : 5,
      }),
      texts,
    );
  }
})();
