// Replay of a recorded terminal (asciicast 2). The recording may be hostile: only output and sizes of
// it are used, and they go nowhere but to xterm.js, whose answers are not read.
"use strict";

(() => {
  const cast = document.getElementById("replay-cast");
  if (!cast) return;
  const [play, speed, place, status] = ["play", "speed", "at", "status"].map((name) => document.getElementById(`replay-${name}`));
  const QUIET_S = 2;

  const lines = cast.textContent.split("\n").flatMap((line) => {
    try {
      return [JSON.parse(line)];
    } catch {
      return [];
    }
  });
  const header = lines.shift() || {};
  const events = lines.filter((each) => Array.isArray(each) && Number.isFinite(each[0]) && ["o", "r"].includes(each[1]) && typeof each[2] === "string");
  const end = events.reduce((most, each) => Math.max(most, each[0]), 0);

  const terminal = new Terminal({
    fontFamily: 'ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace',
    disableStdin: true,
    screenReaderMode: true,
    // Links of the recording lead nowhere.
    linkHandler: { activate: () => {} },
  });
  terminal.open(document.getElementById("replay-screen"));
  // All keys are the page's.
  terminal.attachCustomKeyEventHandler(() => false);

  const within = (count, usual) => (count >= 1 && count <= 500 ? Math.floor(count) : usual);
  // In the order of what is written, which is shown later.
  const resize = (columns, rows, before = "") => terminal.write(before, () => terminal.resize(within(columns, 80), within(rows, 24)));
  const clock = (s) => `${Math.floor(s / 60)}:${String(Math.floor(s % 60)).padStart(2, "0")}`;
  let next, now, last, timer;

  const goTo = (time) => {
    if (!(time >= now)) {
      resize(header.width, header.height, "\x1bc");
      next = 0;
    }
    now = Math.min(time, end);
    for (; next < events.length && events[next][0] <= now; next++) {
      const [, kind, text] = events[next];
      if (kind === "o") terminal.write(text);
      else resize(...text.split("x").map(Number));
    }
    place.value = now;
    status.textContent = `${clock(now)} of ${clock(end)}`;
  };
  const pause = () => {
    clearInterval(timer);
    timer = undefined;
    play.textContent = "Play";
  };
  const tick = () => {
    const time = performance.now();
    const quiet = next < events.length ? events[next][0] - QUIET_S : 0;
    goTo(Math.max(now + ((time - last) / 1000) * speed.value, quiet));
    last = time;
    if (now >= end) pause();
  };

  play.onclick = () => {
    if (timer) {
      pause();
      return;
    }
    if (now >= end) goTo(0);
    last = performance.now();
    timer = setInterval(tick, 50);
    play.textContent = "Pause";
  };
  place.max = Math.ceil(end);
  place.oninput = () => goTo(Number(place.value));
  goTo(0);
  play.disabled = false;
})();
