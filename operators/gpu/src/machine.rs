//! What there is on a machine with a GPU, and what there must be. Nothing here needs CUDA, so its tests run everywhere.

pub mod places;
pub mod versions;
