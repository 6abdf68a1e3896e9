// Copies of the forward pass's kernels with one deliberate bug each, for `kernels/host/mutants.cu`.

use std::path::Path;
use std::{fs, io};

/// A deliberate bug: its name, its file, and the text to replace.
struct Mutant {
    name: &'static str,
    file: &'static str,
    original: &'static str,
    mutated: &'static str,
}

const COPIED_FILES: [&str; 6] = ["vectors.cuh", "norm.cuh", "rope.cuh", "work.cuh", "plain.cuh", "flash.cuh"];

const MUTANTS: [Mutant; 12] = [
    // sums the first warp only
    Mutant {
        name: "norm_reduction",
        file: "vectors.cuh",
        original: "warp < blockDim.x / 32; warp++",
        mutated: "warp < 1; warp++",
    },
    // divides by one too few
    Mutant {
        name: "norm_tail",
        file: "norm.cuh",
        original: "float spread = block_sum(sum, partial) / static_cast<float>(width);",
        mutated: "float spread = block_sum(sum, partial) / static_cast<float>(width - 1);",
    },
    // reads the sums before all warps have written theirs
    Mutant {
        name: "norm_race",
        file: "vectors.cuh",
        original: "    }\n    __syncthreads();\n    float sum = 0.0f;",
        mutated: "    }\n    float sum = 0.0f;",
    },
    // adds only half of the lanes that share a head
    Mutant {
        name: "rope_reduction",
        file: "rope.cuh",
        original: "unsigned distance = shape.lanes / 2;",
        mutated: "unsigned distance = shape.lanes / 4;",
    },
    // leaves the last vector of a half unrotated
    Mutant {
        name: "rope_tail",
        file: "rope.cuh",
        original: "token < shape.tokens && at < half;",
        mutated: "token < shape.tokens && at + W < half;",
    },
    // adds only two of the four threads that share a row
    Mutant {
        name: "attention_reduction",
        file: "work.cuh",
        original: "    return value + __shfl_xor_sync(0xffffffffu, value, 2);",
        mutated: "    return value;",
    },
    // lets a row see the key after it
    Mutant {
        name: "plain_tail",
        file: "plain.cuh",
        original: "key + part + 4 * j > work.first + row ?",
        mutated: "key + part + 4 * j > work.first + row + 1 ?",
    },
    // reads keys before they are loaded
    Mutant {
        name: "plain_race",
        file: "plain.cuh",
        original: "        __syncthreads();\n        float score[COUNT];",
        mutated: "        float score[COUNT];",
    },
    // reads a row's weights before its neighbours have written them
    Mutant { name: "plain_order", file: "plain.cuh", original: "        __syncwarp();\n", mutated: "" },
    Mutant {
        name: "flash_tail",
        file: "flash.cuh",
        original: "if (key > row + i / 2 * 8) {",
        mutated: "if (key > row + 1 + i / 2 * 8) {",
    },
    // reads values before the copies of all threads have arrived
    Mutant {
        name: "flash_race",
        file: "flash.cuh",
        original: "        __syncthreads();\n        // The values are there",
        mutated: "        // The values are there",
    },
    // does not write the last row of a run
    Mutant {
        name: "flash_end",
        file: "flash.cuh",
        original: "            if (work.first + row < work.length) {",
        mutated: "            if (work.first + row + 1 < work.length) {",
    },
];

/// Writes a folder per bug. Fails if the text to replace does not occur exactly once: the kernel has changed, so the
/// bug must change too.
pub fn write(kernels: &Path, out: &Path) -> io::Result<()> {
    for mutant in &MUTANTS {
        let folder = out.join(mutant.name);
        fs::create_dir_all(&folder)?;
        for file in COPIED_FILES {
            let mut text = fs::read_to_string(kernels.join("forward").join(file))?;
            if file == mutant.file {
                if text.matches(mutant.original).count() != 1 {
                    let message = format!("{}: {file} does not have its place once", mutant.name);
                    return Err(io::Error::other(message));
                }
                text = text.replace(mutant.original, mutant.mutated);
            }
            // `#pragma once` would treat equal files of different folders as one.
            let guard = format!("MUTANT_{}_{}", mutant.name, file.replace('.', "_"));
            let text = text
                .replace("#pragma once", &format!("#ifndef {guard}\n#define {guard}"))
                .replace("#include \"../portable.cuh\"\n", "")
                .replace("namespace forward", &format!("namespace {}", mutant.name));
            fs::write(folder.join(file), text + "\n#endif\n")?;
        }
    }
    Ok(())
}
