"use strict";
// The plan line that is marked in all drawings: the line that is pointed at, or else the line that was clicked.
//
//   const selection = commplan.selection()
//   selection.hover(line)    mark a line while it is pointed at; 0 when that ends
//   selection.pick(line)     select a line; deselects it if it is selected already
//   selection.selected()     the line that was clicked, or 0
//   selection.release()      deselect it
//   selection.of(name)       the selection for one drawing, which also has listen(act): act(line) is called for
//                            each change of the marked line, 0 for none; removes earlier listeners of that name
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
