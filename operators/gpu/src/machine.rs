//! Requirements on a machine with a GPU, and what it has. Nothing in this module needs CUDA, so its tests run
//! everywhere.

pub mod library_folders;
pub mod versions;
