//! How a model makes scores of labels from its hidden vector: one way for each loss that it may be trained with.

use super::FasttextError;

/// fastText's table of the logistic function: intervals, and the range from -8 to 8.
const SIGMOID_INTERVALS: usize = 512;
const SIGMOID_LIMIT: f32 = 8.0;
/// The count of a node of the tree that has no count yet.
const NOT_COUNTED: i64 = 1_000_000_000_000_000;

pub(super) enum Loss {
    /// `hs`: a probability at each branch of a tree.
    Hierarchical(Tree),
    /// `ns` and `ova`: a probability of each label, apart from the others.
    EachLabel { sigmoid: Vec<f32>, labels: usize },
    /// `softmax`: probabilities that add up to one.
    Softmax { labels: usize },
}

/// The Huffman tree of the labels. The first nodes are the labels, the last one is the root.
pub(super) struct Tree {
    labels: usize,
    /// The parent of each node but the root, and whether the node is its second child.
    parents: Vec<(u32, bool)>,
}

impl Loss {
    pub(super) fn new(loss: i32, label_counts: &[i64]) -> Result<Self, FasttextError> {
        let labels = label_counts.len();
        Ok(match loss {
            1 => Self::Hierarchical(Tree::new(label_counts)?),
            3 => Self::Softmax { labels },
            _ => Self::EachLabel { sigmoid: sigmoid_table(), labels },
        })
    }

    /// Scores of labels. `product` is the scalar product of a row of the output matrix and the hidden vector.
    pub(super) fn scores(&self, product: &dyn Fn(usize) -> f32, labels: &[usize]) -> Vec<f32> {
        match self {
            Self::Hierarchical(tree) => labels.iter().map(|&label| tree.score(product, label)).collect(),
            Self::EachLabel { sigmoid, labels: count } => {
                let score = |label: usize| score_of(log(look_up(sigmoid, product(label))));
                labels.iter().map(|&label| if label < *count { score(label) } else { 0.0 }).collect()
            }
            Self::Softmax { labels: count } => {
                let products: Vec<f32> = (0..*count).map(product).collect();
                let largest = products.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let powers: Vec<f32> = products.iter().map(|&product| libm::expf(product - largest)).collect();
                let sum = powers.iter().fold(0.0, |sum, power| sum + power);
                labels.iter().map(|&label| powers.get(label).map_or(0.0, |power| score_of(log(power / sum)))).collect()
            }
        }
    }
}

/// fastText's logarithm, which is finite at 0.
fn log(x: f32) -> f32 {
    libm::log(f64::from(x) + 1e-5) as f32
}

/// The score that fastText reports for a logarithm.
fn score_of(log: f32) -> f32 {
    libm::expf(log)
}

fn sigmoid_table() -> Vec<f32> {
    let at = |i: usize| (i as f32 * 2.0 * SIGMOID_LIMIT) / SIGMOID_INTERVALS as f32 - SIGMOID_LIMIT;
    (0..=SIGMOID_INTERVALS).map(|i| (1.0 / (1.0 + f64::from(libm::expf(-at(i))))) as f32).collect()
}

fn look_up(sigmoid: &[f32], x: f32) -> f32 {
    if x < -SIGMOID_LIMIT {
        return 0.0;
    }
    // NaN, from a model of such numbers, is index 0
    let index = ((x + SIGMOID_LIMIT) * SIGMOID_INTERVALS as f32 / SIGMOID_LIMIT / 2.0) as usize;
    if x > SIGMOID_LIMIT { 1.0 } else { sigmoid.get(index).copied().unwrap_or(1.0) }
}

impl Tree {
    fn new(counts: &[i64]) -> Result<Self, FasttextError> {
        let labels = counts.len();
        let invalid = |got: i64| FasttextError::Invalid {
            field: "the count of a label",
            got,
            valid: "0 to 10^15, with the most frequent label first".into(),
        };
        let mut total = 0_i64;
        for &count in counts {
            total = total.saturating_add(count.max(0));
            if count < 0 || total >= NOT_COUNTED {
                return Err(invalid(count));
            }
        }
        let nodes = 2 * labels - 1;
        let mut all: Vec<i64> = counts.iter().copied().chain(std::iter::repeat_n(NOT_COUNTED, labels - 1)).collect();
        let mut parents = vec![(0, false); nodes];
        let (mut leaf, mut node) = (labels.checked_sub(1), labels);
        for parent in labels..nodes {
            let mut sum = 0;
            for is_second in [false, true] {
                let smallest = match leaf {
                    Some(index) if all.get(node).is_none_or(|&count| all[index] < count) => {
                        leaf = index.checked_sub(1);
                        index
                    }
                    _ => {
                        node += 1;
                        node - 1
                    }
                };
                // a node is made before it is used, if counts fall from label to label
                if smallest >= parent {
                    return Err(invalid(counts.first().copied().unwrap_or_default()));
                }
                parents[smallest] = (parent as u32, is_second);
                sum += all[smallest];
            }
            all[parent] = sum;
        }
        Ok(Self { labels, parents })
    }

    /// The score of a label: the product of the probabilities on the way from the root.
    fn score(&self, product: &dyn Fn(usize) -> f32, label: usize) -> f32 {
        let root = self.parents.len() - 1;
        let mut path = Vec::new();
        let mut node = label;
        while node < root {
            let (parent, is_second) = self.parents[node];
            path.push((parent as usize - self.labels, is_second));
            node = parent as usize;
        }
        let smallest = log(0.0);
        let mut score = 0.0;
        for (row, is_second) in path.into_iter().rev() {
            let second = (1.0 / (1.0 + f64::from(libm::expf(-product(row))))) as f32;
            score += if is_second { log(second) } else { log((1.0 - f64::from(second)) as f32) };
            // as in fastText, which does not go on below a branch that is so unlikely
            if score < smallest {
                return 0.0;
            }
        }
        score_of(score)
    }
}
