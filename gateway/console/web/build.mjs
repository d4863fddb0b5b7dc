// Bundles the console into two files, which the gateway serves as they are: `npm run build [FOLDER]`.
import { build } from "esbuild";

const folder = process.argv[2] ?? "../static";
await build({
  entryPoints: { app: "src/app.tsx", style: "src/style.css" },
  outdir: folder,
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2022",
  jsx: "automatic",
  jsxImportSource: "preact",
  legalComments: "eof",
  charset: "utf8",
});
