"use strict";
// A machine as a tree of switches and places, its links as wide as what they carry.
//
//   commplan.machine({ levels, members, phases })
//     levels   outermost first: [{ name, count, latency, bandwidth, nbytes: [of each phase] }]
//     members  of the outermost level: [{ name, up, down, holds, members, hidden }]; up, down: bytes of each
//              phase on the link to it, or null: then every link is drawn as the busiest of its level;
//              hidden: how many members like it the box stands for
//     gives    { element, show(index of a phase) }
(() => {
  const { html, svg, bytes, seconds } = commplan;
  const FONT = "12px system-ui, sans-serif";
  const WIDEST = 11; // pixels of the busiest link, each direction
  const ROW = 96;
  const BOX = 34;

  commplan.machine = ({ levels, members }) => {
    const picture = svg("svg", { class: "machine", role: "group", "aria-label": "links of the machine" });
    const element = html("div", { class: "machine-frame", tabindex: 0, role: "region", "aria-label": "links of the machine, may scroll" }, picture);
    const places = count(members);
    const unit = Math.max(30, Math.min(120, 1240 / places));
    const width = places * unit;
    const height = levels.length * ROW + BOX + 16;
    picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
    picture.setAttribute("width", width);
    picture.setAttribute("height", height);

    const show = (phase) => {
      const load = (member, depth) => member.up
        ? [member.up[phase], member.down[phase]]
        : [levels[depth].nbytes[phase], levels[depth].nbytes[phase]];
      const loads = [];
      walk(members, 0, (member, depth) => loads.push([load(member, depth), levels[depth]]));
      const most = Math.max(1, ...loads.flatMap(([each]) => each));
      const longest = Math.max(1e-30, ...loads.flatMap(([each, level]) => each.map((nbytes) => nbytes / level.bandwidth)));
      const links = [];
      const boxes = [];
      const draw = (list, depth, left, from) => {
        let x = left;
        for (const member of list) {
          const wide = count([member]) * unit;
          const centre = x + wide / 2;
          const top = (depth + 1) * ROW;
          const carried = load(member, depth);
          links.push(link(member, levels[depth], carried, most, longest, [from, depth * ROW + BOX], [centre, top]));
          boxes.push(box(member, centre, top, Math.min(wide - 6, 200), !member.members.length));
          draw(member.members, depth + 1, x, centre);
          x += wide;
        }
      };
      const root = { name: `${levels[0].name} network`, holds: "", members, hidden: 0 };
      boxes.push(box(root, width / 2, 0, Math.min(240, width - 8), false));
      draw(members, 0, 0, width / 2);
      picture.replaceChildren(...links, ...boxes);
    };
    show(0);
    return { element, show };
  };

  function count(members) {
    return members.reduce((sum, member) => sum + (member.members.length ? count(member.members) : 1), 0);
  }

  function walk(members, depth, act) {
    for (const member of members) {
      act(member, depth);
      walk(member.members, depth + 1, act);
    }
  }

  function link(member, level, [up, down], most, longest, [x0, y0], [x1, y1]) {
    const wide = (nbytes) => (nbytes ? Math.max(1.5, (nbytes / most) * WIDEST) : 1);
    const gap = (wide(up) + wide(down)) / 4 + 1;
    const middle = (y0 + y1) / 2;
    const one = (nbytes, side) => {
      const busy = nbytes / level.bandwidth / longest;
      const at = side * gap;
      return svg("path", {
        d: `M${x0 + at} ${y0}C${x0 + at} ${middle} ${x1 + at} ${middle} ${x1 + at} ${y1}`,
        class: nbytes ? (busy > 0.66 ? "link hot" : busy > 0.2 ? "link warm" : "link cool") : "link idle",
        "stroke-width": wide(nbytes),
      });
    };
    const rows = [
      [null, `link of ${member.name}${member.hidden > 1 ? ` and ${member.hidden - 1} more` : ""}`],
      ["up", bytes(up)], ["down", bytes(down)],
      ["busy", seconds(Math.max(up, down) / level.bandwidth)], ["level", level.name],
    ];
    return svg("g", {
      class: "link-pair", role: "img", tabindex: up || down ? 0 : null,
      "aria-label": rows.map(([name, text]) => (name ? `${name} ${text}` : text)).join(", "),
      onmouseenter: (event) => commplan.tooltip.show(rows, event.currentTarget.getBoundingClientRect()),
      onmouseleave: () => commplan.tooltip.hide(),
      onfocus: (event) => commplan.tooltip.show(rows, event.currentTarget.getBoundingClientRect()),
      onblur: () => commplan.tooltip.hide(),
    }, one(up, -1), one(down, 1), svg("path", { d: `M${x0} ${y0}L${x1} ${y1}`, class: "link-target" }));
  }

  function box(member, x, top, width, place) {
    const name = member.hidden > 1 ? `${member.hidden} more` : member.name;
    const short = commplan.textWidth(name, FONT) > width - 6 ? name.replace(/^.* /, "") : name;
    const rows = [short, ...(member.holds ? [member.holds] : [])].map((text) => commplan.fitted(text, width - 6, FONT));
    const height = BOX;
    return svg("g", { class: `member${place ? " place" : ""}${member.hidden > 1 ? " several" : ""}${member.holds ? "" : " empty"}`, role: "img", "aria-label": `${name} ${member.holds}` },
      svg("title", {}, `${name} ${member.holds}`),
      svg("rect", { x: x - width / 2, y: top, width, height, rx: 4 }),
      rows.map((text, index) => svg("text", { x, y: top + height / 2 + (index - (rows.length - 1) / 2) * 14, class: index ? "more" : "first" }, text)));
  }
})();
