// An EventSource that is left alone: it comes again by itself until it is told that it has all.
function watch(path) {
  const seen = { pieces: [], opened: 0, lost: 0, done: 0 };
  const source = new EventSource(path);
  source.onopen = () => (seen.opened += 1);
  source.onmessage = ({ data }) => {
    if (data === "[DONE]") return (seen.done += 1);
    const text = JSON.parse(data).choices?.[0]?.delta.content;
    if (text) seen.pieces.push(text);
  };
  seen.over = new Promise((resolve) => {
    source.onerror = () => {
      if (source.readyState === EventSource.CLOSED) return resolve(true);
      seen.lost += 1;
    };
  });
  return seen;
}
