"use strict";
// Layered layout of a directed graph, top to bottom: boxes never overlap, and edges avoid them.
//
//   commplan.layered(nodes, edges, { layerGap, nodeGap })
//     nodes     [{ id, width, height }], in pixels
//     edges     [{ tail, head }], ids of nodes; edges that close a cycle are reversed for the layout
//     layerGap  pixels between layers; nodeGap: pixels between the nodes of a layer
//     returns   { width, height, at, paths }: at is a Map of id -> { x, y }, the centers; paths has the text of
//               an SVG path for each edge, in the order of `edges`
//
// Sugiyama, Tagawa and Toda, "Methods for visual understanding of hierarchical system structures" (1981). The
// layer of a node is the length of its longest path. An edge over several layers gets a dummy node in each.
// Layers are ordered by barycenters. The positions within a layer minimize the squared distances from neighbors
// for this order (pool adjacent violators). The module does not access the document.
(() => {
  const SWEEPS = 16; // iterations over all layers, for their order and for positions
  const DUMMY = 14; // width of a dummy node, in pixels

  commplan.layered = (nodes, edges, { layerGap = 34, nodeGap = 22 } = {}) => {
    const byId = new Map(nodes.map((node) => [node.id, { ...node, above: [], below: [] }]));
    const links = forward(
      byId,
      edges.filter((edge) => byId.has(edge.tail) && byId.has(edge.head)),
    );
    rank(byId, links);
    const { layers, chains } = withDummies(byId, links);
    order(layers);
    const width = place(layers, nodeGap);
    const height = stack(layers, layerGap);
    const ports = spread(chains);
    const paths = edges.map((edge) => {
      const chain = chains.find((each) => each.edge === edge);
      return chain ? path(chain, ports) : "";
    });
    return { width, height, at: byId, paths };
  };

  // The edges as links without cycles: depth-first search, in which edges that lead back are reversed (`turned`).
  function forward(byId, edges) {
    const out = new Map([...byId.keys()].map((id) => [id, []]));
    edges.forEach((edge) => out.get(edge.tail).push(edge));
    const state = new Map();
    const turned = new Set();
    for (const start of byId.keys()) {
      if (state.has(start)) continue;
      const stack = [[start, 0]];
      state.set(start, "open");
      while (stack.length) {
        const top = stack[stack.length - 1];
        const edge = out.get(top[0])[top[1]++];
        if (!edge) {
          state.set(top[0], "done");
          stack.pop();
        } else if (state.get(edge.head) === "open") {
          turned.add(edge);
        } else if (!state.has(edge.head)) {
          state.set(edge.head, "open");
          stack.push([edge.head, 0]);
        }
      }
    }
    return edges.map((edge) =>
      turned.has(edge)
        ? { edge, tail: edge.head, head: edge.tail, turned: true }
        : { edge, tail: edge.tail, head: edge.head },
    );
  }

  // Sets `layer` of each node: the length of the longest path to it. A root is directly above its first reader.
  function rank(byId, links) {
    const waiting = new Map([...byId.keys()].map((id) => [id, 0]));
    const out = new Map([...byId.keys()].map((id) => [id, []]));
    for (const link of links) {
      waiting.set(link.head, waiting.get(link.head) + 1);
      out.get(link.tail).push(link.head);
    }
    const ready = [...byId.keys()].filter((id) => !waiting.get(id));
    const roots = [...ready];
    byId.forEach((node) => {
      node.layer = 0;
    });
    while (ready.length) {
      const id = ready.shift();
      for (const head of out.get(id)) {
        byId.get(head).layer = Math.max(byId.get(head).layer, byId.get(id).layer + 1);
        waiting.set(head, waiting.get(head) - 1);
        if (!waiting.get(head)) ready.push(head);
      }
    }
    for (const id of roots) {
      const heads = out.get(id).map((head) => byId.get(head).layer);
      if (heads.length) byId.get(id).layer = Math.min(...heads) - 1;
    }
  }

  // The nodes of each layer, with dummies, and for each link the chain of nodes from its tail to its head.
  // Also sets the neighbors `above` and `below` of each node.
  function withDummies(byId, links) {
    const layers = [];
    const add = (node) => {
      (layers[node.layer] ||= []).push(node);
      return node;
    };
    byId.forEach(add);
    for (let i = 0; i < layers.length; i += 1) layers[i] ||= [];
    const chains = links.map((link) => {
      const tail = byId.get(link.tail);
      const head = byId.get(link.head);
      const nodes = [tail];
      for (let layer = tail.layer + 1; layer < head.layer; layer += 1) {
        nodes.push(add({ dummy: true, layer, width: DUMMY, height: 0, above: [], below: [] }));
      }
      nodes.push(head);
      for (let i = 1; i < nodes.length; i += 1) {
        nodes[i - 1].below.push(nodes[i]);
        nodes[i].above.push(nodes[i - 1]);
      }
      return { ...link, nodes };
    });
    return { layers, chains };
  }

  // Orders the nodes of each layer, and sets their `index`, such that few edges cross.
  function order(layers) {
    const number = (layer) =>
      layer.forEach((node, index) => {
        node.index = index;
      });
    layers.forEach(number);
    const mean = (near, node) =>
      near.length ? near.reduce((sum, other) => sum + other.index, 0) / near.length : node.index;
    const crossings = () => {
      let count = 0;
      for (const layer of layers) {
        const ends = layer.flatMap((node) => node.below.map((other) => [node.index, other.index]));
        for (let i = 0; i < ends.length; i += 1) {
          for (let j = i + 1; j < ends.length; j += 1) {
            if ((ends[i][0] - ends[j][0]) * (ends[i][1] - ends[j][1]) < 0) count += 1;
          }
        }
      }
      return count;
    };
    // Counting crossings is quadratic: in large graphs the last of four sweeps is used instead of the best.
    const large = layers.some((layer) => layer.length > 150);
    let best = layers.map((layer) => [...layer]);
    let least = large ? 0 : crossings();
    for (let sweep = 0; sweep < SWEEPS && (large ? sweep < 4 : least); sweep += 1) {
      const down = sweep % 2 === 0;
      for (const layer of down ? layers : [...layers].reverse()) {
        const wanted = new Map(layer.map((node) => [node, mean(down ? node.above : node.below, node)]));
        layer.sort((a, b) => wanted.get(a) - wanted.get(b) || a.index - b.index);
        number(layer);
      }
      const count = large ? 0 : crossings();
      if (count < least || large) {
        least = count;
        best = layers.map((layer) => [...layer]);
      }
    }
    best.forEach((layer, index) => {
      layers[index] = layer;
      number(layer);
    });
  }

  // Sets `x`, the center of each node, from 0 on, and returns the width. The first sweeps pull nodes towards one
  // side, alternately those above and below; the last four towards both.
  function place(layers, gap) {
    for (const layer of layers) {
      let x = 0;
      for (const node of layer) {
        node.x = x + node.width / 2;
        x += node.width + gap;
      }
    }
    for (let sweep = 0; sweep < SWEEPS; sweep += 1) {
      const down = sweep % 2 === 0;
      for (const layer of down ? layers : [...layers].reverse()) {
        settle(
          layer,
          (node) => {
            const near =
              sweep < SWEEPS - 4 ? (down ? node.above : node.below) : [...node.above, ...node.below];
            return near.length ? near.reduce((sum, other) => sum + other.x, 0) / near.length : node.x;
          },
          gap,
        );
      }
    }
    const all = layers.flat();
    const left = Math.min(...all.map((node) => node.x - node.width / 2));
    all.forEach((node) => {
      node.x -= left;
    });
    return Math.max(...all.map((node) => node.x + node.width / 2));
  }

  // Sets the positions of a layer that are nearest to wanted(node), in order and `gap` pixels apart. Nodes whose
  // wanted positions conflict form a block, which is at their weighted mean. Dummies weigh more, for straight edges.
  function settle(layer, wanted, gap) {
    const blocks = [];
    let offset = 0;
    layer.forEach((node, index) => {
      if (index) offset += (layer[index - 1].width + node.width) / 2 + gap;
      const weight = node.dummy ? 4 : 1;
      blocks.push({ sum: (wanted(node) - offset) * weight, weight, nodes: [[node, offset]] });
      while (blocks.length > 1) {
        const last = blocks[blocks.length - 1];
        const before = blocks[blocks.length - 2];
        if (before.sum / before.weight <= last.sum / last.weight) break;
        before.sum += last.sum;
        before.weight += last.weight;
        before.nodes.push(...last.nodes);
        blocks.pop();
      }
    });
    for (const block of blocks) {
      for (const [node, shift] of block.nodes) node.x = block.sum / block.weight + shift;
    }
  }

  // Sets `y`, the center of each node, and `band`, the top and bottom of its layer; returns the height.
  function stack(layers, gap) {
    let y = 0;
    for (const layer of layers) {
      const height = Math.max(0, ...layer.map((node) => node.height));
      for (const node of layer) {
        node.y = y + height / 2;
        node.band = [y, y + height];
      }
      y += height + gap;
    }
    return y - gap;
  }

  // The x at which each edge leaves (`out`) and enters (`in`) its boxes: side by side, in the order of their other
  // ends.
  function spread(chains) {
    const ports = new Map(chains.map((chain) => [chain, {}]));
    const sides = [
      ["out", (chain) => chain.nodes[0], (chain) => chain.nodes[1]],
      ["in", (chain) => chain.nodes[chain.nodes.length - 1], (chain) => chain.nodes[chain.nodes.length - 2]],
    ];
    for (const [side, own, next] of sides) {
      const groups = new Map();
      chains.forEach((chain) => groups.set(own(chain), [...(groups.get(own(chain)) || []), chain]));
      for (const [node, group] of groups) {
        group.sort((a, b) => next(a).x - next(b).x);
        group.forEach((chain, index) => {
          ports.get(chain)[side] = node.x + node.width * 0.6 * ((index + 1) / (group.length + 1) - 0.5);
        });
      }
    }
    return ports;
  }

  // The text of an SVG path: vertical within layers, and curves between them.
  function path(chain, ports) {
    const { nodes } = chain;
    const round = (number) => Math.round(number * 10) / 10;
    const port = ports.get(chain);
    const first = nodes[0];
    const last = nodes[nodes.length - 1];
    if (nodes.length === 2 && Math.abs(port.out - port.in) < 6) port.out = port.in = (port.out + port.in) / 2;
    const points = [
      [port.out, first.y + first.height / 2],
      [port.out, first.band[1]],
    ];
    for (const node of nodes.slice(1, -1)) points.push([node.x, node.band[0]], [node.x, node.band[1]]);
    points.push([port.in, last.band[0]], [port.in, last.y - last.height / 2]);
    if (chain.turned) points.reverse();
    let text = `M${round(points[0][0])} ${round(points[0][1])}`;
    for (let i = 1; i < points.length; i += 1) {
      const [x, y] = points[i];
      const [x0, y0] = points[i - 1];
      if (x === x0 && y === y0) continue;
      const middle = round((y0 + y) / 2);
      text +=
        x === x0 ? `V${round(y)}` : `C${round(x0)} ${middle} ${round(x)} ${middle} ${round(x)} ${round(y)}`;
    }
    return text;
  }
})();
