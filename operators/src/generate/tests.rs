//! Text of small teachers: against a walk of its own, in any number of slots, and broken.

use super::*;
