// Terminal of a machine: xterm.js over a WebSocket, whose frames `reconciler/gateway/web.py` describes.
"use strict";

(() => {
  const place = document.getElementById("terminal");
  const status = document.getElementById("terminal-status");
  if (!place) return;

  const mono = 'ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace';
  const terminal = new Terminal({ fontFamily: mono, fontSize: 14, screenReaderMode: true, scrollback: 5000 });
  const fit = new FitAddon.FitAddon();
  terminal.loadAddon(fit);
  terminal.open(place);
  fit.fit();
  // Tab belongs to the shell, so the keyboard needs another way out.
  terminal.attachCustomKeyEventHandler((key) => {
    if (!(key.ctrlKey && key.key === "F6")) return true;
    if (key.type === "keydown") document.getElementById("terminal-leave").focus();
    return false;
  });

  const scheme = location.protocol === "https:" ? "wss:" : "ws:";
  const socket = new WebSocket(`${scheme}//${location.host}${place.dataset.path}`, "gpuaas.terminal.v1");
  socket.binaryType = "arraybuffer";
  let ready = false;
  let words = "";

  const size = () => ({ columns: Math.min(terminal.cols, 1000), rows: Math.min(terminal.rows, 1000) });
  const tell = (event, more) => socket.send(JSON.stringify({ event, ...size(), ...more }));
  const type = (bytes) => {
    for (let at = 0; ready && at < bytes.length; at += 16384) socket.send(bytes.subarray(at, at + 16384));
  };

  socket.onopen = () => tell("open", { ticket: place.dataset.ticket });
  socket.onmessage = ({ data }) => {
    if (typeof data !== "string") {
      terminal.write(new Uint8Array(data));
      return;
    }
    const message = JSON.parse(data);
    if (message.event === "session_ready") {
      ready = true;
      // The window may have changed while the terminal was opened.
      tell("resize");
      status.textContent = message.recorded ? "Connected. What it shows is recorded." : "Connected.";
      terminal.focus();
    } else if (message.event === "closed") {
      words = message.reason;
    }
  };
  socket.onclose = ({ code }) => {
    ready = false;
    terminal.options.disableStdin = true;
    // A server that ends closes the socket without an event.
    if (code === 1012) words ||= "The service restarts. Open another terminal.";
    status.textContent = `Closed. ${words || "The connection was lost, or this page may not open it."}`;
    document.getElementById("terminal-again").hidden = false;
  };

  terminal.onData((text) => type(new TextEncoder().encode(text)));
  terminal.onBinary((text) => type(Uint8Array.from(text, (letter) => letter.charCodeAt(0))));
  terminal.onResize(() => ready && tell("resize"));
  // The element also changes without the window, for example when the page gets a scroll bar.
  new ResizeObserver(() => fit.fit()).observe(place);
})();
