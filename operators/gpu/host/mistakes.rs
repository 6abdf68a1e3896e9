// Copies of the forward pass's kernels with one deliberate bug each, for `kernels/host/mistakes.cu`.

use std::path::Path;
use std::{fs, io};

/// A deliberate bug: its name, its file, and the text to replace.
struct Mistake {
    name: &'static str,
    file: &'static str,
    right: &'static str,
    wrong: &'static str,
}

const FILES: [&str; 6] = ["vectors.cuh", "norm.cuh", "rope.cuh", "work.cuh", "plain.cuh", "flash.cuh"];

const MISTAKES: [Mistake; 12] = [
    // sums the first warp only
    Mistake {
        name: "norm_reduction",
        file: "vectors.cuh",
        right: "warp < blockDim.x / 32; warp++",
        wrong: "warp < 1; warp++",
    },
    // divides by one too few
    Mistake {
        name: "norm_tail",
        file: "norm.cuh",
        right: "float spread = block_sum(sum, partial) / static_cast<float>(width);",
        wrong: "float spread = block_sum(sum, partial) / static_cast<float>(width - 1);",
    },
    // reads the sums before all warps have written theirs
    Mistake {
        name: "norm_race",
        file: "vectors.cuh",
        right: "    }\n    __syncthreads();\n    float sum = 0.0f;",
        wrong: "    }\n    float sum = 0.0f;",
    },
    // adds only half of the lanes that share a head
    Mistake {
        name: "rope_reduction",
        file: "rope.cuh",
        right: "unsigned distance = shape.lanes / 2;",
        wrong: "unsigned distance = shape.lanes / 4;",
    },
    // leaves the last vector of a half unrotated
    Mistake {
        name: "rope_tail",
        file: "rope.cuh",
        right: "token < shape.tokens && at < half;",
        wrong: "token < shape.tokens && at + W < half;",
    },
    // adds only two of the four threads that share a row
    Mistake {
        name: "attention_reduction",
        file: "work.cuh",
        right: "    return value + __shfl_xor_sync(0xffffffffu, value, 2);",
        wrong: "    return value;",
    },
    // lets a row see the key after it
    Mistake {
        name: "plain_tail",
        file: "plain.cuh",
        right: "key + part + 4 * j > work.first + row ?",
        wrong: "key + part + 4 * j > work.first + row + 1 ?",
    },
    // reads keys before they are loaded
    Mistake {
        name: "plain_race",
        file: "plain.cuh",
        right: "        __syncthreads();\n        float score[COUNT];",
        wrong: "        float score[COUNT];",
    },
    // reads a row's weights before its neighbours have written them
    Mistake { name: "plain_order", file: "plain.cuh", right: "        __syncwarp();\n", wrong: "" },
    Mistake {
        name: "flash_tail",
        file: "flash.cuh",
        right: "if (key > row + i / 2 * 8) {",
        wrong: "if (key > row + 1 + i / 2 * 8) {",
    },
    // reads values before the copies of all threads have arrived
    Mistake {
        name: "flash_race",
        file: "flash.cuh",
        right: "        __syncthreads();\n        // The values are there",
        wrong: "        // The values are there",
    },
    // does not write the last row of a run
    Mistake {
        name: "flash_end",
        file: "flash.cuh",
        right: "            if (work.first + row < work.length) {",
        wrong: "            if (work.first + row + 1 < work.length) {",
    },
];

/// Writes a folder per bug. Fails if the text to replace does not occur exactly once: the kernel has changed, so the
/// bug must change too.
pub fn write(kernels: &Path, out: &Path) -> io::Result<()> {
    for mistake in &MISTAKES {
        let folder = out.join(mistake.name);
        fs::create_dir_all(&folder)?;
        for file in FILES {
            let mut text = fs::read_to_string(kernels.join("forward").join(file))?;
            if file == mistake.file {
                if text.matches(mistake.right).count() != 1 {
                    let message = format!("{}: {file} does not have its place once", mistake.name);
                    return Err(io::Error::other(message));
                }
                text = text.replace(mistake.right, mistake.wrong);
            }
            // `#pragma once` would treat equal files of different folders as one.
            let guard = format!("MISTAKE_{}_{}", mistake.name, file.replace('.', "_"));
            let text = text
                .replace("#pragma once", &format!("#ifndef {guard}\n#define {guard}"))
                .replace("#include \"../portable.cuh\"\n", "")
                .replace("namespace forward", &format!("namespace {}", mistake.name));
            fs::write(folder.join(file), text + "\n#endif\n")?;
        }
    }
    Ok(())
}
