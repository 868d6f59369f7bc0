"use strict";
// The plan line that is marked in every drawing: the one pointed at, else the one that was clicked.
//
//   const selection = commplan.selection()
//   selection.hover(line), selection.pick(line)   0: none; to pick a line again lets go of it
//   selection.held(), selection.release()         the line that was clicked, or 0; no line is any more
//   selection.of(name)                            the same for one drawing, with listen(act): act(line) is called
//                                                 for each change; what listened under that name no longer does
commplan.selection = () => {
  const listeners = new Map();
  let [pointed, held, marked] = [0, 0, 0];
  const tell = () => {
    const line = pointed || held;
    if (line === marked) return;
    marked = line;
    for (const acts of listeners.values()) acts.forEach((act) => act(line));
  };
  const selection = {
    hover(line) {
      pointed = line;
      tell();
    },
    pick(line) {
      held = held === line ? 0 : line;
      pointed = 0;
      tell();
    },
    held: () => held,
    release() {
      held = 0;
      tell();
    },
    of(name) {
      const acts = [];
      listeners.set(name, acts);
      marked = 0; // a new drawing shows none
      return { ...selection, listen: (act) => acts.push(act) };
    },
  };
  return selection;
};
