"use strict";
// Fills the sections of the page with panels that share one selection, and handles the theme.
(() => {
  const report = JSON.parse(document.getElementById("document").textContent);
  const { panels, html } = commplan;

  const selection = commplan.selection().of("page");
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") selection.release();
  });

  document.getElementById("name").textContent = report.plan;
  const fill = (id, parts) => document.getElementById(id).append(...parts.flat().filter(Boolean));
  fill("summary", panels.summary(report));
  fill("source", panels.source(report, selection));
  fill("graph", panels.graph(report, selection));
  fill("time", [...panels.time(report, selection), ...panels.run(report, selection)]);
  fill("links", panels.links(report));
  fill("choices", panels.choices(report, selection));
  fill("lines", panels.lines(report, selection));
  fill("proofs", panels.proofs(report, selection));
  fill("foot", [
    html(
      "p",
      {},
      `Written by commplan ${report.version}. Times are predictions of a model unless stated otherwise.`,
    ),
  ]);

  window.addEventListener("beforeprint", () => {
    document.querySelectorAll("details").forEach((each) => {
      each.open = true;
    });
  });

  const themes = ["system", "light", "dark"];
  const button = document.getElementById("theme");
  let theme = "system";
  const apply = (next) => {
    theme = themes.includes(next) ? next : "system";
    if (theme === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    button.textContent = `Theme: ${theme}`;
  };
  const kept = (act) => {
    try {
      return act(window.localStorage);
    } catch {
      return null; // pages from files may have no storage
    }
  };
  apply(kept((storage) => storage.getItem("commplan-theme")));
  button.addEventListener("click", () => {
    apply(themes[(themes.indexOf(theme) + 1) % themes.length]);
    kept((storage) => storage.setItem("commplan-theme", theme));
  });
  document.documentElement.dataset.ready = "true";
})();
