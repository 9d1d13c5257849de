// Numbers as people read them.

export const whole = (value) => Math.round(value).toLocaleString("en");

export function percent(share) {
  if (share > 0 && share < 0.0005) return "< 0.1 %";
  return `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;
}

export const count = (number, one, many = `${one}s`) => `${whole(number)} ${number === 1 ? one : many}`;

export function seconds(value) {
  if (value < 1) return `${(1000 * value).toFixed(value < 0.01 ? 1 : 0)} ms`;
  return `${value.toFixed(value < 10 ? 2 : 0)} s`;
}

export function speed(value) {
  return value < 10 ? value.toFixed(1) : whole(value);
}

export function duration(value) {
  if (value < 90) return `${Math.floor(value)} s`;
  if (value < 5400) return `${Math.round(value / 60)} min`;
  return value < 129600 ? `${Math.round(value / 3600)} h` : `${Math.round(value / 86400)} days`;
}

// Text on one line: what breaks it is shown.
export const oneLine = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥");
