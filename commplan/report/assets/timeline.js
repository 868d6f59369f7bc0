"use strict";
// Events on lanes over time, with zoom, pan, and the keyboard.
//
//   commplan.timeline({ title, lanes, seconds, describe, hover, pick })
//     lanes     [{ name, group, events: [{ name, line, start, seconds, work, waited }] }], times in seconds.
//               Adjacent lanes with the same `group` are drawn under its name. work: host, device, network or
//               other. waited: seconds of waiting at the beginning of the event.
//     seconds   least duration of the whole timeline
//     describe  a function of an event that returns the rows of its tooltip: [[name, text], ..], [null, title]
//     hover     called with an event's line when it is pointed at or chosen by key, and with 0 when that ends
//     pick      called with an event's line when it is clicked, or Enter is pressed
//     returns   { element, highlight(line), shift(group, seconds), first(group, line), redraw() }: shift moves all
//               events of a group by `seconds`; first returns the start of the first event of a line, or null
//
// Keys: arrows go from event to event and from lane to lane; with Shift, left and right move the view; + and -
// zoom; 0 shows all. The wheel zooms only with Ctrl, since it scrolls the page otherwise. Dragging moves the view.
(() => {
  const { html, svg, seconds: timed } = commplan;
  const ROW = 24; // height of a row of events, in pixels
  const HEAD = 26; // height of the axis, and of the name of a group, in pixels
  const FONT = "12px system-ui, sans-serif";
  const ROWS = 8; // most rows of one lane, whose events may overlap
  const CLOSEST = 1e-9; // least seconds that are visible

  commplan.timeline = ({ title, lanes, seconds, describe, hover = () => {}, pick = () => {} }) => {
    const all = lanes.map((lane) => ({ ...lane, group: lane.group || "", events: [...lane.events] }));
    all.forEach(stacked);
    const shifts = new Map();
    const state = { from: 0, to: 1, lane: -1, event: 0, line: 0, width: 900, label: 100 };
    const picture = svg("svg", { class: "timeline", "aria-hidden": "true" });
    const live = html("p", { class: "visually-hidden", "aria-live": "polite" });
    const stage = html(
      "div",
      {
        class: "timeline-stage",
        tabindex: 0,
        role: "application",
        "aria-roledescription": "timeline",
        "aria-label": `${title}. Arrow keys go from event to event, plus and minus zoom, 0 shows all.`,
      },
      picture,
    );
    const button = (text, label, act) =>
      html("button", { type: "button", "aria-label": label, onclick: act }, text);
    const tools = html(
      "div",
      { class: "timeline-tools", role: "group", "aria-label": "view of the timeline" },
      button("−", "zoom out", () => zoom(2)),
      button("+", "zoom in", () => zoom(0.5)),
      button("◀", "earlier", () => pan(-0.25)),
      button("▶", "later", () => pan(0.25)),
      button("whole", "show all", () => show(...whole())),
    );
    const element = html("div", { class: "timeline-frame" }, tools, stage, live);

    const longest = Math.max(...all.map((lane) => commplan.textWidth(lane.name, FONT)), 50) + 24;
    const labeled = (width) => Math.min(width < 600 ? 110 : 190, longest);
    const start = (lane, event) => event.start + (shifts.get(lane.group) || 0);
    function whole() {
      let [least, most] = [0, seconds];
      for (const lane of all) {
        for (const event of lane.events) {
          least = Math.min(least, start(lane, event));
          most = Math.max(most, start(lane, event) + event.seconds);
        }
      }
      return [least, most > least ? most : least + 1e-6];
    }
    const scale = (time) =>
      state.label + ((time - state.from) / (state.to - state.from)) * (state.width - state.label - 10);

    function show(from, to) {
      const [least, most] = whole();
      const wide = Math.min(Math.max(to - from, CLOSEST), most - least);
      state.from = Math.max(least, Math.min(from, most - wide));
      state.to = state.from + wide;
      draw();
    }
    function zoom(factor, around = (state.from + state.to) / 2) {
      show(around - (around - state.from) * factor, around + (state.to - around) * factor);
    }
    function pan(share) {
      const by = (state.to - state.from) * share;
      show(state.from + by, state.to + by);
    }

    function draw() {
      const parts = [];
      const rows = [];
      let y = HEAD;
      let group = null;
      all.forEach((lane, index) => {
        if (lane.group !== group) {
          group = lane.group;
          if (group) {
            parts.push(
              svg(
                "text",
                { x: 4, y: y + 17, class: "group-name" },
                commplan.fitted(group, state.width - 8, FONT),
              ),
            );
            y += HEAD;
          }
        }
        const height = lane.rows * ROW + 6;
        parts.push(
          svg("rect", { x: 0, y, width: state.width, height, class: index % 2 ? "lane odd" : "lane" }),
        );
        rows.push([lane, index, y]);
        y += height;
      });
      const axis = ticks().flatMap(([time, text]) => [
        svg("line", { x1: scale(time), x2: scale(time), y1: HEAD - 6, y2: y, class: "tick" }),
        svg("text", { x: scale(time) + 3, y: 15, class: "tick-text" }, text),
      ]);
      const bars = rows.flatMap(([lane, index, top]) => barsOf(lane, index, top));
      const names = rows.flatMap(([lane, , top]) => [
        svg("rect", {
          x: 0,
          y: top,
          width: state.label - 4,
          height: lane.rows * ROW + 6,
          class: "lane-label",
        }),
        svg(
          "text",
          { x: 8, y: top + 19, class: "lane-name" },
          commplan.fitted(lane.name, state.label - 18, FONT),
        ),
      ]);
      picture.setAttribute("width", state.width);
      picture.setAttribute("height", y + 2);
      picture.classList.toggle(
        "dimmed",
        all.some((lane) => lane.events.some((event) => state.line && event.line === state.line)),
      );
      picture.replaceChildren(...parts, ...axis, ...bars, ...names);
    }

    // The bars of a lane. A bar that is too narrow to be seen is omitted if another one is at its place.
    function barsOf(lane, index, top) {
      const ends = new Array(lane.rows).fill(-1);
      const bars = [];
      lane.events.forEach((event, number) => {
        const x = scale(start(lane, event));
        const right = scale(start(lane, event) + event.seconds);
        const current = index === state.lane && number === state.event && document.activeElement === stage;
        const active = state.line && event.line === state.line;
        if (right < state.label || x > state.width) return;
        if (right - Math.max(x, ends[event.row]) < 0.7 && x - ends[event.row] < 0.7 && !current) return;
        ends[event.row] = Math.max(right, x + 1.5);
        const left = Math.max(x, state.label - 2);
        const width = Math.max(1.5, Math.min(right, state.width + 2) - left);
        const y = top + 3 + event.row * ROW;
        const text = width > 16 ? labelOf(event, width - 10) : "";
        bars.push(
          svg(
            "g",
            {
              class: `bar kind-${event.work}${active ? " active" : ""}${current ? " current" : ""}${width < 4 ? " thin" : ""}`,
              "data-lane": index,
              "data-event": number,
            },
            svg("rect", { x: left, y, width, height: ROW - 2, rx: width > 6 ? 3 : 0 }),
            waiting(lane, event, left, right, y),
            text ? svg("text", { x: left + 5, y: y + 15 }, text) : null,
          ),
        );
      });
      return bars;
    }

    // The part of a bar in which its rank waited for the last rank to arrive.
    function waiting(lane, event, left, right, y) {
      if (!event.waited) return null;
      const width = Math.min(scale(start(lane, event) + event.waited), right, state.width) - left;
      if (width < 1.5) return null;
      return svg("rect", { x: left, y, width, height: ROW - 2, class: "waited" });
    }

    // The ticks of the axis: [seconds, text], at multiples of 1, 2 or 5 times a power of ten.
    function ticks() {
      const span = state.to - state.from;
      const count = Math.max(2, Math.floor((state.width - state.label) / 110));
      const rough = span / count;
      const power = 10 ** Math.floor(Math.log10(rough));
      const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
      const marks = [];
      for (let i = Math.ceil(state.from / step); i * step <= state.to && marks.length < 40; i += 1) {
        const time = i * step;
        const text =
          Math.abs(time) < step / 1e3 ? "0" : (time < 0 ? "−" : "") + exactly(Math.abs(time), step);
        marks.push([time, text]);
      }
      return marks;
    }

    // The indices of lane and event of an element, and its bar; null outside of bars.
    function eventOf(target) {
      const bar = target.closest && target.closest(".bar");
      return bar ? [Number(bar.dataset.lane), Number(bar.dataset.event), bar] : null;
    }
    // Shows the tooltip of an event; `aloud`: also for screen readers.
    function tell(laneIndex, number, bar, aloud) {
      const lane = all[laneIndex];
      const event = lane.events[number];
      const rows = [
        ...describe(event),
        ["starts", timed(Math.max(0, start(lane, event)))],
        ["lane", lane.name],
      ];
      if (bar) commplan.tooltip.show(rows, bar.getBoundingClientRect());
      if (aloud) live.textContent = rows.map(([name, text]) => (name ? `${name} ${text}` : text)).join(", ");
      hover(event.line);
    }

    let dragged = null;
    stage.addEventListener("pointerover", (event) => {
      const pointed = eventOf(event.target);
      if (pointed && !dragged) tell(...pointed, false);
    });
    stage.addEventListener("pointerout", (event) => {
      if (eventOf(event.target)) {
        commplan.tooltip.hide();
        hover(0);
      }
    });
    stage.addEventListener("pointerdown", (event) => {
      if (event.button === 0) dragged = { x: event.clientX, from: state.from, to: state.to, moved: false };
    });
    window.addEventListener("pointermove", (event) => {
      if (!dragged) return;
      const by = ((event.clientX - dragged.x) / (state.width - state.label)) * (dragged.to - dragged.from);
      if (Math.abs(event.clientX - dragged.x) > 3) {
        dragged.moved = true;
        commplan.tooltip.hide();
        show(dragged.from - by, dragged.to - by);
      }
    });
    window.addEventListener("pointerup", () => {
      setTimeout(() => {
        dragged = null;
      });
    });
    stage.addEventListener("click", (event) => {
      const clicked = eventOf(event.target);
      if (!clicked || (dragged && dragged.moved)) return;
      [state.lane, state.event] = clicked;
      pick(all[state.lane].events[state.event].line);
    });
    stage.addEventListener(
      "wheel",
      (event) => {
        if (!event.ctrlKey && !event.metaKey) return;
        event.preventDefault();
        const x = event.clientX - picture.getBoundingClientRect().left - state.label;
        const time = state.from + (x / (state.width - state.label)) * (state.to - state.from);
        zoom(event.deltaY > 0 ? 1.25 : 0.8, time);
      },
      { passive: false },
    );

    // Moves the current event by lanes, to the event nearest in time, or by events within its lane.
    function go(laneBy, eventBy) {
      if (!all.length) return;
      if (state.lane < 0) [state.lane, state.event] = [0, 0];
      else if (laneBy) {
        const before = all[state.lane];
        const time = before.events.length ? start(before, before.events[state.event]) : 0;
        state.lane = Math.max(0, Math.min(all.length - 1, state.lane + laneBy));
        const after = all[state.lane];
        const distances = after.events.map((event) => Math.abs(start(after, event) - time));
        state.event = Math.max(0, distances.indexOf(Math.min(...distances)));
      } else {
        state.event = Math.max(0, Math.min(all[state.lane].events.length - 1, state.event + eventBy));
      }
      const lane = all[state.lane];
      const event = lane.events[state.event];
      const wide = state.to - state.from;
      if (start(lane, event) < state.from)
        show(start(lane, event) - wide * 0.1, start(lane, event) + wide * 0.9);
      if (start(lane, event) > state.to)
        show(start(lane, event) - wide * 0.5, start(lane, event) + wide * 0.5);
      draw();
      tell(state.lane, state.event, picture.querySelector(".bar.current"), true);
    }
    const chosen = () => (state.lane >= 0 ? all[state.lane].events[state.event] : null);
    const center = () => (chosen() ? start(all[state.lane], chosen()) + chosen().seconds / 2 : undefined);
    const keys = {
      ArrowRight: (event) => (event.shiftKey ? pan(0.2) : go(0, 1)),
      ArrowLeft: (event) => (event.shiftKey ? pan(-0.2) : go(0, -1)),
      ArrowDown: () => go(1, 0),
      ArrowUp: () => go(-1, 0),
      "+": () => zoom(0.5, center()),
      "=": () => zoom(0.5, center()),
      "-": () => zoom(2, center()),
      0: () => show(...whole()),
      Home: () => show(...whole()),
      Enter: () => chosen() && pick(chosen().line),
    };
    stage.addEventListener("keydown", (event) => {
      if (!(event.key in keys) || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      keys[event.key](event);
    });
    stage.addEventListener("focus", draw);
    stage.addEventListener("blur", () => {
      commplan.tooltip.hide();
      hover(0);
      draw();
    });

    new ResizeObserver(() => {
      const width = Math.max(320, stage.clientWidth);
      if (width === state.width) return;
      state.width = width;
      state.label = labeled(width);
      draw();
    }).observe(stage);
    [state.from, state.to] = whole();
    state.label = labeled(state.width);
    draw();
    return {
      element,
      highlight(line) {
        state.line = line;
        draw();
      },
      shift(group, by) {
        shifts.set(group, by);
        show(...whole());
      },
      first(group, line) {
        const starts = all
          .filter((lane) => lane.group === group)
          .flatMap((lane) => lane.events.filter((event) => event.line === line).map((event) => event.start));
        return starts.length ? Math.min(...starts) : null;
      },
      redraw: draw,
    };
  };

  // The text in a bar: line and name, or the line alone if these do not fit. Without a line, the shortened name.
  function labelOf(event, width) {
    if (!event.line) return commplan.fitted(event.name, width, FONT);
    const text = `${event.line}  ${event.name}`;
    const line = String(event.line);
    if (commplan.textWidth(text, FONT) <= width) return text;
    return commplan.textWidth(line, FONT) <= width ? line : "";
  }

  // `time` with enough digits to distinguish it from the next tick, which is `step` later.
  function exactly(time, step) {
    const [unit, size] = [
      ["s", 1],
      ["ms", 1e-3],
      ["us", 1e-6],
      ["ns", 1e-9],
    ].find(([, each]) => time >= each) || ["ns", 1e-9];
    const digits = Math.max(0, Math.ceil(-Math.log10(step / size) - 1e-9));
    return `${Number((time / size).toFixed(Math.min(6, digits)))} ${unit}`;
  }

  // Sets `row` of each event, such that events in one row do not overlap if `ROWS` suffice, and `rows` of the lane.
  function stacked(lane) {
    const ends = [];
    lane.events = lane.events.map((event) => {
      let row = ends.findIndex((end) => end <= event.start + 1e-12);
      if (row < 0) row = Math.min(ends.length, ROWS - 1);
      ends[row] = event.start + event.seconds;
      return { ...event, row };
    });
    lane.rows = Math.max(1, ends.length);
  }
})();
