"use strict";
// The plan line that is marked in every drawing: the one pointed at, else the one that was clicked.
//
//   const selection = commplan.selection()
//   selection.hover(line), selection.pick(line)   0: no line; picking the selected line again deselects it
//   selection.selected(), selection.release()     the line that was clicked, or 0; deselect it
//   selection.of(name)                            the same for one drawing, with listen(act): act(line) is called
//                                                 for each change; earlier listeners of that name are removed
commplan.selection = () => {
  const listeners = new Map();
  let [pointed, selected, marked] = [0, 0, 0];
  const notify = () => {
    const line = pointed || selected;
    if (line === marked) return;
    marked = line;
    for (const acts of listeners.values()) acts.forEach((act) => act(line));
  };
  const selection = {
    hover(line) {
      pointed = line;
      notify();
    },
    pick(line) {
      selected = selected === line ? 0 : line;
      pointed = 0;
      notify();
    },
    selected: () => selected,
    release() {
      selected = 0;
      notify();
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
