// Starts the language server for plans, and ends it with the window.
const vscode = require("vscode");
const { LanguageClient } = require("vscode-languageclient/node");

let client;

exports.activate = async (context) => {
  const settings = vscode.workspace.getConfiguration("commplan");
  const [command, ...args] = settings.get("command");
  const folder = vscode.workspace.workspaceFolders?.[0]?.uri.fsPath;
  client = new LanguageClient(
    "commplan",
    "commplan",
    { command, args, options: { cwd: folder } },
    {
      documentSelector: [{ language: "plan" }],
      initializationOptions: { flags: settings.get("flags") },
    },
  );
  context.subscriptions.push(
    vscode.workspace.onDidChangeConfiguration(async (change) => {
      if (!change.affectsConfiguration("commplan")) return;
      const again = await vscode.window.showInformationMessage(
        "commplan: the settings hold once the window is loaded again.",
        "Reload",
      );
      if (again) vscode.commands.executeCommand("workbench.action.reloadWindow");
    }),
  );
  await client.start();
};

exports.deactivate = () => client?.stop();
