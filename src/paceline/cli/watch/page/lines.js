/**
 * Curves on a canvas. A line is {series, indices (the points to draw), color, dash, isFaint, isMarked (points of their
 * own), isArea (filled down to the axis)}.
 */

const POINT_RADIUS = 3,
  MIN_POINT_DISTANCE = 8;

/** From values to pixels. top() gives NaN for what cannot be drawn: gaps, and zero on a logarithmic axis. */
export function project({bbox, scales: {x, y}}, isLog) {
  const f = isLog ? Math.log : value => value;
  const bottom = f(y.min),
    perY = bbox.height / (f(y.max) - bottom),
    floor = bbox.top + bbox.height;
  const perX = bbox.width / (x.max - x.min);
  return {
    floor,
    width: bbox.width,
    isInside: value => value >= x.min && value <= x.max,
    left: value => bbox.left + (value - x.min) * perX,
    top: value => (value - value !== 0 || (isLog && value <= 0) ? NaN : floor - (f(value) - bottom) * perY),
  };
}

export function drawLine(context, projection, {series: {x, y}, indices, color, dash, isFaint, isArea}) {
  const {floor} = projection,
    path = new Path2D(),
    area = isArea ? new Path2D() : null;
  let isOpen = false,
    left = 0;
  for (const i of indices) {
    const top = projection.top(y[i]);
    if (top !== top) {
      if (isOpen) area?.lineTo(left, floor);
      isOpen = false;
      continue;
    }
    left = projection.left(x[i]);
    if (isOpen) {
      path.lineTo(left, top);
      area?.lineTo(left, top);
    } else {
      path.moveTo(left, top);
      area?.moveTo(left, floor);
      area?.lineTo(left, top);
    }
    isOpen = true;
  }
  if (isOpen) area?.lineTo(left, floor);
  if (area) {
    context.globalAlpha = 0.13;
    context.fillStyle = color;
    context.fill(area);
  }
  context.globalAlpha = isFaint ? 0.28 : 1;
  context.strokeStyle = color;
  context.lineWidth = (isFaint ? 1 : 1.6) * devicePixelRatio;
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
