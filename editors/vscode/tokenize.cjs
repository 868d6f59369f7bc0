// The scopes of each piece of a plan, by VS Code's own tokenizer. Reads {"grammar": PATH, "texts": [..]} on stdin, and
// writes for each text a list of lines, each a list of [start, end, [scope, ..]].
const fs = require("fs");
const path = require("path");
const oniguruma = require("vscode-oniguruma");
const { INITIAL, Registry, parseRawGrammar } = require("vscode-textmate");

async function main() {
  const { grammar: place, texts } = JSON.parse(fs.readFileSync(0, "utf8"));
  const wasm = path.join(path.dirname(require.resolve("vscode-oniguruma/package.json")), "release", "onig.wasm");
  await oniguruma.loadWASM(fs.readFileSync(wasm).buffer);
  const registry = new Registry({
    onigLib: Promise.resolve({
      createOnigScanner: (patterns) => new oniguruma.OnigScanner(patterns),
      createOnigString: (text) => new oniguruma.OnigString(text),
    }),
    loadGrammar: async () => parseRawGrammar(fs.readFileSync(place, "utf8"), place),
  });
  const grammar = await registry.loadGrammar("source.plan");
  const all = texts.map((text) => {
    let state = INITIAL;
    return text.split(/\r\n|\r|\n/).map((line) => {
      const { tokens, ruleStack } = grammar.tokenizeLine(line, state);
      state = ruleStack;
      return tokens.map((token) => [token.startIndex, token.endIndex, token.scopes]);
    });
  });
  process.stdout.write(JSON.stringify(all));
}

main();
