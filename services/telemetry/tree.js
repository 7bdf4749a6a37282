"use strict";
// Draws a draft tree: nodes by depth, children below each other, as large as they are worth.
const SVG = "http://www.w3.org/2000/svg";
function drawn(parent, name, attributes, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}
function drawTree(svg, nodes) {
  svg.replaceChildren();
  const gap = 22, across = 130, depth = [], row = [];
  let rows = 0;
  const place = node => {
    depth[node] = node ? depth[nodes[node].parent] + 1 : 0;
    const children = nodes.map((_, i) => i).filter(i => i && nodes[i].parent === node);
    children.forEach(place);
    row[node] = children.length ? row[children[0]] : rows++;
  };
  if (nodes.length) place(0);
  const x = node => 10 + depth[node] * across, y = node => 18 + row[node] * gap;
  const shades = nodes.map((node, i) => node.accepted || i === 0 ? "var(--good)" : node.verified ? "var(--fg)" : "var(--dim)");
  nodes.forEach((node, i) => {
    if (i) drawn(svg, "path", {
      d: `M${x(node.parent) + 8} ${y(node.parent)} C${x(i) - 30} ${y(node.parent)} ${x(i) - 50} ${y(i)} ${x(i) - 8} ${y(i)}`,
      fill: "none", stroke: shades[i], "stroke-width": node.accepted ? 2.5 : 1, "stroke-dasharray": node.verified ? "none" : "3 3"});
  });
  nodes.forEach((node, i) => {
    const dot = drawn(svg, "circle", {cx: x(i), cy: y(i), r: 3 + 5 * Math.sqrt(node.value), fill: shades[i], opacity: node.verified || i === 0 ? 1 : .5});
    drawn(dot, "title", {}, `confidence ${node.confidence.toFixed(3)}, value ${node.value.toFixed(3)}, `
      + (node.accepted ? "accepted" : node.verified ? "verified" : "cut"));
    const label = (node.text ? JSON.stringify(node.text).slice(1, -1) : `node ${i}`).slice(0, 10);
    drawn(svg, "text", {x: x(i) + 11, y: y(i) + 4, style: `fill:${shades[i]};stroke:var(--bg);stroke-width:4px;paint-order:stroke`}, `${label} ${i ? node.confidence.toFixed(2) : ""}`);
  });
  const columns = Math.max(0, ...depth) + 1;
  svg.setAttribute("viewBox", `0 0 ${Math.max(columns * across + 40, 600)} ${rows * gap + 20}`);
  svg.style.minWidth = `${columns * across}px`;
  svg.style.maxHeight = `${rows * gap * 1.3 + 20}px`;
}
const roundColour = index => `hsl(${index * 47 % 360} 70% 50% / .22)`;
