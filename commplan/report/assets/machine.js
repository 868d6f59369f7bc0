"use strict";
// A machine as a tree of switches and places. The width of a link shows the bytes that it carries.
//
//   commplan.machine({ levels, members, phases })
//     levels   outermost first: [{ name, count, latency, bandwidth, nbytes }]; nbytes: bytes on the busiest link
//              of the level in each phase
//     members  of the outermost level: [{ name, up, down, holds, members, hidden }]; up, down: bytes of each
//              phase on the link to the member, or null, and then its link is drawn as the busiest of its level;
//              hidden: the number of members that the box represents, 0 for a single one
//     returns  { element, show(phase) }: show draws the loads of the phase with that index
(() => {
  const { html, svg, bytes, seconds } = commplan;
  const FONT = "12px system-ui, sans-serif";
  const ROW = 120; // pixels from one level to the next
  const BOX = 34; // height of a box, in pixels

  commplan.machine = ({ levels, members }) => {
    const picture = svg("svg", { class: "machine", role: "group", "aria-label": "links of the machine" });
    const element = html(
      "div",
      {
        class: "machine-frame",
        tabindex: 0,
        role: "region",
        "aria-label": "links of the machine, may scroll",
      },
      picture,
    );
    const places = count(members);
    const height = levels.length * ROW + BOX + 16;
    let [unit, width, widest, shown] = [0, 0, 0, 0];

    // Fits the places in `room` pixels; if they would be too narrow, the picture scrolls.
    const fit = (room) => {
      unit = Math.max(20, Math.min(100, room / places));
      width = places * unit;
      widest = Math.min(9, unit / 5); // pixels of the busiest link, each direction
      picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
      picture.setAttribute("width", width);
      picture.setAttribute("height", height);
    };

    const show = (phase) => {
      shown = phase;
      const load = (member, depth) =>
        member.up
          ? [member.up[phase], member.down[phase]]
          : [levels[depth].nbytes[phase], levels[depth].nbytes[phase]];
      const loads = [];
      walk(members, 0, (member, depth) => loads.push([load(member, depth), levels[depth]]));
      const most = Math.max(1, ...loads.flatMap(([each]) => each));
      const longest = Math.max(
        1e-30,
        ...loads.flatMap(([each, level]) => each.map((nbytes) => nbytes / level.bandwidth)),
      );
      const links = [];
      const boxes = [];
      const draw = (list, depth, left, from, room) => {
        let x = left;
        for (const [number, member] of list.entries()) {
          const port = from + room * ((number + 1) / (list.length + 1) - 0.5);
          const wide = count([member]) * unit;
          const center = x + wide / 2;
          const top = (depth + 1) * ROW;
          const carried = load(member, depth);
          links.push(
            link(
              member,
              levels[depth],
              carried,
              most,
              longest,
              [port, depth * ROW + BOX],
              [center, top],
              widest,
            ),
          );
          const own = Math.min(wide - Math.min(6, wide / 6), 200);
          boxes.push(box(member, center, top, own, !member.members.length));
          draw(member.members, depth + 1, x, center, own);
          x += wide;
        }
      };
      const root = { name: `${levels[0].name} network`, holds: "", members, hidden: 0 };
      const own = Math.min(240, width - 8);
      boxes.push(box(root, width / 2, 0, own, false));
      draw(members, 0, 0, width / 2, own);
      picture.replaceChildren(...links, ...boxes);
    };
    fit(1300);
    show(0);
    new ResizeObserver(() => {
      const room = element.clientWidth;
      if (!room || Math.abs(places * Math.max(20, Math.min(100, room / places)) - width) < 1) return;
      fit(room);
      show(shown);
    }).observe(element);
    return { element, show };
  };

  // The width of members, in places: merged members count as two.
  function count(members) {
    return members.reduce(
      (sum, member) => sum + (member.members.length ? count(member.members) : member.hidden ? 2 : 1),
      0,
    );
  }

  // Calls act(member, depth) for all members, outer ones first.
  function walk(members, depth, act) {
    for (const member of members) {
      act(member, depth);
      walk(member.members, depth + 1, act);
    }
  }

  // A link with both directions, from (x0, y0) to (x1, y1). `most`: the most bytes on a link, which is `widest`
  // pixels wide; `longest`: the most seconds that a link is busy, which determines colors.
  function link(member, level, [up, down], most, longest, [x0, y0], [x1, y1], widest) {
    const wide = (nbytes) => (nbytes ? Math.max(1.5, (nbytes / most) * widest) : 1);
    const gap = (wide(up) + wide(down)) / 4 + 1;
    const length = Math.hypot(x1 - x0, y1 - y0);
    const direction = (nbytes, side) => {
      const busy = nbytes / level.bandwidth / longest;
      const [dx, dy] = [(side * gap * (y1 - y0)) / length, (side * gap * (x0 - x1)) / length];
      const [ex, ey] = [((x1 - x0) / length) * 8, ((y1 - y0) / length) * 8]; // boxes cover the ends
      return svg("path", {
        d: `M${x0 + dx - ex} ${y0 + dy - ey}L${x1 + dx + ex} ${y1 + dy + ey}`,
        class: nbytes ? (busy > 0.66 ? "link hot" : busy > 0.2 ? "link warm" : "link cool") : "link idle",
        "stroke-width": wide(nbytes),
      });
    };
    const rows = [
      [null, `link of ${member.name}${member.hidden > 1 ? ` and ${member.hidden - 1} more` : ""}`],
      ["up", bytes(up)],
      ["down", bytes(down)],
      ["busy", seconds(Math.max(up, down) / level.bandwidth)],
      ["level", level.name],
    ];
    return svg(
      "g",
      {
        class: "link-pair",
        role: "img",
        tabindex: up || down ? 0 : null,
        "aria-label": rows.map(([name, text]) => (name ? `${name} ${text}` : text)).join(", "),
        onmouseenter: (event) => commplan.tooltip.show(rows, event.currentTarget.getBoundingClientRect()),
        onmouseleave: () => commplan.tooltip.hide(),
        onfocus: (event) => commplan.tooltip.show(rows, event.currentTarget.getBoundingClientRect()),
        onblur: () => commplan.tooltip.hide(),
      },
      direction(up, -1),
      direction(down, 1),
      svg("path", { d: `M${x0} ${y0}L${x1} ${y1}`, class: "link-target" }),
    );
  }

  // The box of a member, centered at x. `place`: whether it has no inner members.
  function box(member, x, top, width, place) {
    const name = member.hidden > 1 ? `${member.hidden} more` : member.name;
    const whole = [name, ...(member.holds ? [member.holds] : member.hidden ? ["idle"] : [])];
    // A narrow place shows only the number of its rank; narrow merged members show only their number.
    const narrow = whole.some((text) => commplan.textWidth(text, FONT) > width - 6);
    const short = member.hidden
      ? `+${member.hidden}`
      : (member.holds || name.replace(/^.* /, "")).replace(/ranks? /g, "").replace(/servers? /g, "s");
    const texts = place && narrow ? [commplan.textWidth(short, FONT) > width - 2 ? "" : short] : whole;
    const rows = texts.map((text) => commplan.fitted(text, width - 2, FONT));
    const height = BOX;
    return svg(
      "g",
      {
        class: `member${place ? " place" : ""}${member.hidden > 1 ? " several" : ""}${member.holds ? "" : " empty"}`,
        role: "img",
        "aria-label": `${name} ${member.holds}`,
      },
      svg("title", {}, `${name} ${member.holds}`),
      svg("rect", { x: x - width / 2, y: top, width, height, rx: 4 }),
      rows.map((text, index) =>
        svg(
          "text",
          { x, y: top + height / 2 + (index - (rows.length - 1) / 2) * 14, class: index ? "more" : "first" },
          text,
        ),
      ),
    );
  }
})();
