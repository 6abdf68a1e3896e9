//! A permutation of the ids of a vocabulary.

use std::fmt;
use std::sync::Arc;

/// A bijection from ids to numbers, both from 0 to V − 1.
#[derive(Clone, PartialEq, Eq)]
pub struct Permutation {
    numbers: Arc<[u32]>,
    ids: Arc<[u32]>,
}

impl Permutation {
    /// Creates the permutation from the numbers of ids 0, 1, ….
    ///
    /// # Errors
    /// If the numbers are not a permutation of 0 to `vocab_size` − 1. The message names the id that is wrong.
    pub fn new(numbers: &[i64], vocab_size: usize) -> Result<Self, String> {
        if numbers.len() != vocab_size {
            let first = match numbers.len() < vocab_size {
                true => format!("id {} has none", numbers.len()),
                false => format!("the last id is {}", vocab_size.saturating_sub(1)),
            };
            return Err(format!("has {} numbers, and {first}; valid: one for each of {vocab_size} ids", numbers.len()));
        }
        let mut ids: Vec<Option<u32>> = vec![None; vocab_size];
        let mut duplicate = None;
        for (id, &number) in (0u32..).zip(numbers) {
            let Some(place) = usize::try_from(number).ok().and_then(|number| ids.get_mut(number)) else {
                return Err(format!("id {id} has the number {number}; valid: 0 to {}", vocab_size.saturating_sub(1)));
            };
            match place {
                Some(first) => duplicate = duplicate.or(Some((*first, id, number))),
                None => *place = Some(id),
            }
        }
        if let Some((first, second, number)) = duplicate {
            let missing = ids.iter().position(Option::is_none).unwrap_or_default();
            return Err(format!(
                "the ids {first} and {second} both have the number {number}, and no id has {missing}; valid: each number once"
            ));
        }
        Ok(Self { numbers: numbers.iter().map(|&n| n as u32).collect(), ids: ids.into_iter().flatten().collect() })
    }

    /// The number of every id.
    pub fn numbers(&self) -> &[u32] {
        &self.numbers
    }

    /// The number of an id below V.
    pub fn number(&self, id: u32) -> Option<u32> {
        self.numbers.get(id as usize).copied()
    }

    /// The id of a number below V.
    pub fn id(&self, number: u32) -> Option<u32> {
        self.ids.get(number as usize).copied()
    }
}

impl fmt::Debug for Permutation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Permutation of {}", self.numbers.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_permutation_says_which_id() {
        let wrong = |numbers: &[i64]| Permutation::new(numbers, 4).unwrap_err();
        for (numbers, says) in [
            (&[][..], "has 0 numbers, and id 0 has none; valid: one for each of 4 ids"),
            (&[0, 1, 2], "has 3 numbers, and id 3 has none"),
            (&[0, 1, 2, 3, 4], "has 5 numbers, and the last id is 3"),
            (&[0, 1, 4, 3], "id 2 has the number 4; valid: 0 to 3"),
            (&[0, -1, 2, 3], "id 1 has the number -1; valid: 0 to 3"),
            (&[0, 1 << 33, 2, 3], "id 1 has the number 8589934592"),
            (&[3, 1, 0, 1], "the ids 1 and 3 both have the number 1, and no id has 2; valid: each number once"),
        ] {
            assert!(wrong(numbers).contains(says), "{numbers:?}: {}", wrong(numbers));
        }
        let good = Permutation::new(&[2, 0, 3, 1], 4).unwrap();
        for id in 0..4 {
            assert_eq!(good.id(good.number(id).unwrap()), Some(id));
        }
        assert_eq!((good.number(4), good.id(4), good.numbers()), (None, None, &[2, 0, 3, 1][..]));
    }
}
