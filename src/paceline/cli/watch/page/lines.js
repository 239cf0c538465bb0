/**
 * Curves on a canvas. A line is {series, indices (the points to draw), color, dash, isFaint, isMarked (points of their
 * own)}.
 */

const POINT_RADIUS = 3,
  MIN_POINT_DISTANCE = 8,
  MIN_DISTANCE_IN_BOLD = 4;

/** From values to pixels. top() gives NaN for what cannot be drawn: gaps, and zero on a logarithmic axis. */
export function project({bbox, scales: {x, y}}, isLog) {
  const f = isLog ? Math.log : value => value;
  const bottom = f(y.min),
    perY = bbox.height / (f(y.max) - bottom),
    floor = bbox.top + bbox.height;
  const perX = bbox.width / (x.max - x.min);
  return {
    width: bbox.width,
    isInside: value => value >= x.min && value <= x.max,
    left: value => bbox.left + (value - x.min) * perX,
    top: value => (value - value !== 0 || (isLog && value <= 0) ? NaN : floor - (f(value) - bottom) * perY),
  };
}

export function drawLine(context, projection, {series: {x, y}, indices, color, dash, isFaint}) {
  const path = new Path2D();
  let isOpen = false;
  for (const i of indices) {
    const top = projection.top(y[i]);
    if (top === top) path[isOpen ? "lineTo" : "moveTo"](projection.left(x[i]), top);
    isOpen = top === top;
  }
  // Without a GPU a line of one pixel is drawn 20 times as fast as a wider one.
  const isDense = indices.length * MIN_DISTANCE_IN_BOLD * devicePixelRatio > projection.width;
  context.globalAlpha = isFaint ? 0.28 : 1;
  context.strokeStyle = color;
  context.lineWidth = (isFaint || isDense ? 1 : 1.6) * devicePixelRatio;
  context.lineJoin = "round";
  context.setLineDash((dash ?? []).map(length => length * devicePixelRatio));
  context.stroke(path);
  context.setLineDash([]);
  context.globalAlpha = 1;
}

/** The points of evaluations while there is room, and of a curve of one point. */
export function drawPoints(context, projection, {series: {x, y}, indices, color, isMarked}) {
  const hasRoom = indices.length < projection.width / (MIN_POINT_DISTANCE * devicePixelRatio);
  if (indices.length !== 1 && !(isMarked && hasRoom)) return;
  context.fillStyle = color;
  for (const i of indices) {
    const top = projection.top(y[i]);
    if (top !== top || !projection.isInside(x[i])) continue;
    context.beginPath();
    context.arc(projection.left(x[i]), top, POINT_RADIUS * devicePixelRatio, 0, 2 * Math.PI);
    context.fill();
  }
}
