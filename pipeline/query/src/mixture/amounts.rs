//! How much of each table is in a mixture: the documents of a table as an endless sequence, and how far it is taken.
//!
//! ```text
//!   documents by key    0 ──────────── 2^18 │ 0 ──────────── 2^18 │ 0 ─────      (epochs 0, 1, 2 of the table)
//!   stages of the job   ├── stage 0 ──┼── stage 1 ────────┤
//!                                     place                place: the end of what is taken
//! ```
//!
//! A key is a hash of the seed, the table and the number of the document, so any part of the sequence is a sample of the
//! table. Only sums of tokens by the first bits of the key are kept, so a place is exact to 2^-18 of the table, or to a
//! document.

use std::collections::BTreeMap;

use stillhouse_schemas::spec::Input;

const BUCKET_BITS: u32 = 18;
/// Largest number of times that a table may be read.
const MAX_EPOCHS: f64 = 1000.0;
/// Numbers of epochs that differ less from a whole one are whole.
const WHOLE: f64 = 1e-9;

/// A place in the sequence of a table: after all documents of earlier epochs, and those of this one whose bucket is smaller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    epoch: u32,
    bucket: u32,
}

/// Tokens of a table by the key of their documents. Memory: 2 MB.
#[derive(Debug)]
pub(super) struct TokensByKey {
    buckets: Vec<u64>,
    /// Tokens of all documents.
    pub tokens: u64,
    /// Number of documents.
    pub documents: u64,
    /// Bytes of their rows.
    pub bytes: u64,
}

impl TokensByKey {
    pub(super) fn new() -> Self {
        Self { buckets: vec![0; 1 << BUCKET_BITS], tokens: 0, documents: 0, bytes: 0 }
    }

    pub(super) fn add(&mut self, key: u64, tokens: u64, bytes: u64) {
        if let Some(bucket) = self.buckets.get_mut(bucket(key) as usize) {
            *bucket += tokens;
        }
        self.tokens += tokens;
        self.documents += 1;
        self.bytes += bytes;
    }

    /// The place with the number of tokens before it that is nearest to `tokens`, and that number.
    fn place_of(&self, tokens: f64) -> (Place, f64) {
        let epochs = tokens / self.tokens as f64;
        if (epochs - epochs.round()).abs() <= WHOLE * epochs {
            return (Place { epoch: epochs.round() as u32, bucket: 0 }, epochs.round() * self.tokens as f64);
        }
        let (whole, mut before) = (epochs.floor(), 0);
        let rest = tokens - whole * self.tokens as f64;
        for (n, in_bucket) in (0..).zip(&self.buckets) {
            let after = before + in_bucket;
            if after as f64 >= rest {
                let is_nearer = after as f64 - rest <= rest - before as f64;
                let (bucket, reached) = if is_nearer { (n + 1, after) } else { (n, before) };
                return (Place { epoch: whole as u32, bucket }, whole * self.tokens as f64 + reached as f64);
            }
            before = after;
        }
        (Place { epoch: whole as u32 + 1, bucket: 0 }, (whole + 1.0) * self.tokens as f64)
    }
}

fn bucket(key: u64) -> u32 {
    (key >> (u64::BITS - BUCKET_BITS)) as u32
}

/// What is taken of a table.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Taken {
    /// The end of each stage.
    ends: Vec<Place>,
    /// Tokens that are taken, with those of documents that are taken several times.
    pub tokens: f64,
    /// How often the table is read.
    pub epochs: f64,
}

impl Taken {
    /// The stages of the copies of a document, one after the other.
    pub(super) fn stages_of(&self, key: u64) -> impl Iterator<Item = u32> + '_ {
        let bucket = bucket(key);
        (0..).map_while(move |epoch| {
            let place = Place { epoch, bucket };
            let stage = self.ends.partition_point(|end| *end <= place);
            (stage < self.ends.len()).then_some(stage as u32)
        })
    }
}

/// Decides what is taken of each table. Returns it by name.
///
/// # Errors
/// If a table has no tokens, would be read more than [`MAX_EPOCHS`] times, or more than once if it may not, or gives none of its
/// documents.
pub(super) fn decide(
    input: &Input,
    tables: &BTreeMap<String, TokensByKey>,
    may_repeat: bool,
) -> Result<BTreeMap<String, Taken>, String> {
    if let Some((name, empty)) = tables.iter().find(|(_, table)| table.tokens == 0) {
        return Err(format!(
            "{name} has no tokens in its {} documents, after `filter` and other rules; valid: a table with text",
            empty.documents
        ));
    }
    let targets = targets(input, tables);
    let mut all = BTreeMap::new();
    for (name, table) in tables {
        let mut taken = Taken { ends: Vec::new(), tokens: 0.0, epochs: 0.0 };
        for target in targets.get(name).into_iter().flatten() {
            let epochs = target / table.tokens as f64;
            if epochs > MAX_EPOCHS {
                return Err(format!(
                    "{name} would be read {epochs:.0} times: it has {} tokens, and the mixture takes {target:.0}; valid: at most \
                     {MAX_EPOCHS} times",
                    table.tokens
                ));
            }
            if epochs > 1.0 + WHOLE && !may_repeat {
                return Err(format!(
                    "{name} would be read {epochs:.2} times, and `deduplicate` drops the copies of a document: it has {} tokens, and the \
                     mixture takes {target:.0}; valid: at most once",
                    table.tokens
                ));
            }
            let (place, tokens) = table.place_of(*target);
            taken.ends.push(place);
            (taken.tokens, taken.epochs) = (tokens, tokens / table.tokens as f64);
        }
        if taken.tokens == 0.0 {
            return Err(format!(
                "{name} would give none of its {} documents: they have {} tokens, and the mixture takes {:.0}; valid: a larger mixture",
                table.documents,
                table.tokens,
                targets.get(name).and_then(|targets| targets.last()).unwrap_or(&0.0)
            ));
        }
        all.insert(name.clone(), taken);
    }
    Ok(all)
}

/// Tokens of each table up to the end of each stage.
fn targets(input: &Input, tables: &BTreeMap<String, TokensByKey>) -> BTreeMap<String, Vec<f64>> {
    let has = |name: &str| tables.get(name).map_or(0.0, |table| table.tokens as f64);
    let parts = parts(input);
    if parts.is_empty() {
        let amount = |(name, table): (&String, &stillhouse_schemas::spec::Table)| {
            let tokens = match (table.tokens, table.epochs) {
                (Some(tokens), _) => tokens as f64,
                (None, Some(epochs)) => epochs * has(name),
                (None, None) => has(name),
            };
            (name.clone(), vec![tokens])
        };
        return input.tables.iter().map(amount).collect();
    }
    let most = |(name, parts): (&String, &Vec<f64>)| has(name) / parts.iter().sum::<f64>();
    let asked = input.mixture.as_ref().and_then(|mixture| mixture.tokens).map(|tokens| tokens as f64);
    let total = asked.unwrap_or_else(|| parts.iter().map(most).fold(f64::INFINITY, f64::min));
    let cumulative = |parts: &Vec<f64>| {
        let mut sum = 0.0;
        let add = |part: &f64| {
            sum += part;
            total * sum
        };
        parts.iter().map(add).collect()
    };
    parts.iter().map(|(name, parts)| (name.clone(), cumulative(parts))).collect()
}

/// The part of the mixture that each table has in each stage; their sum is 1. Empty without weights.
fn parts(input: &Input) -> BTreeMap<String, Vec<f64>> {
    let stages = input.mixture.as_ref().map_or(&[][..], |mixture| &mixture.stages);
    let own = input.tables.iter().filter_map(|(name, table)| Some((name.clone(), table.weight?)));
    let own: BTreeMap<String, f64> = own.collect();
    let stages: Vec<(f64, &BTreeMap<String, f64>)> = match stages {
        [] if own.is_empty() => return BTreeMap::new(),
        [] => vec![(1.0, &own)],
        stages => stages.iter().map(|stage| (stage.share, &stage.weights)).collect(),
    };
    let of_all: f64 = stages.iter().map(|(share, _)| share).sum();
    let part = |name: &String, (share, weights): &(f64, &BTreeMap<String, f64>)| {
        share / of_all * weights.get(name).unwrap_or(&0.0) / weights.values().sum::<f64>()
    };
    let of_table = |name: &String| (name.clone(), stages.iter().map(|stage| part(name, stage)).collect());
    input.tables.keys().map(of_table).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Documents of `tokens` each, with keys that are evenly spaced.
    fn table(documents: u64, tokens: u64) -> TokensByKey {
        let mut table = TokensByKey::new();
        (0..documents).for_each(|n| table.add(n * (u64::MAX / documents), tokens, 1));
        table
    }

    fn input(tables: &str, mixture: &str) -> Input {
        let mut tables: serde_json::Value = serde_json::from_str(tables).unwrap();
        for table in tables.as_object_mut().unwrap().values_mut() {
            table["format"] = json!("jsonl");
            table["paths"] = json!(["x"]);
        }
        let mixture: serde_json::Value = serde_json::from_str(mixture).unwrap();
        serde_json::from_value(json!({"tables": tables, "mixture": mixture})).unwrap()
    }

    /// Tokens that are taken in each stage, counted document by document.
    fn counted(input: &Input, tables: &[(&str, u64, u64)]) -> Result<BTreeMap<String, Vec<u64>>, String> {
        let built = || tables.iter().map(|(name, documents, tokens)| ((*name).to_owned(), table(*documents, *tokens)));
        let taken = decide(input, &built().collect(), true)?;
        let mut counts = BTreeMap::new();
        for (name, documents, tokens) in tables {
            let taken = &taken[*name];
            let mut stages = vec![0; taken.ends.len()];
            for n in 0..*documents {
                taken.stages_of(n * (u64::MAX / documents)).for_each(|stage| stages[stage as usize] += tokens);
            }
            let all: u64 = stages.iter().sum();
            assert_eq!(all as f64, taken.tokens, "{name}");
            counts.insert((*name).to_owned(), stages);
        }
        Ok(counts)
    }

    #[test]
    fn weights_take_as_much_as_no_table_is_repeated_or_what_is_asked() {
        let tables = [("a", 1000, 10), ("b", 500, 10)];
        let weights = r#"{"a": {"weight": 3}, "b": {"weight": 1}}"#;
        let of =
            |tables: &str, mixture: &str| counted(&input(tables, mixture), &[("a", 1000, 10), ("b", 500, 10)]).unwrap();
        assert_eq!(of(weights, "null"), BTreeMap::from([("a".into(), vec![10_000]), ("b".into(), vec![3_330])]));
        let asked = of(weights, r#"{"tokens": 40000}"#);
        assert_eq!(asked, BTreeMap::from([("a".into(), vec![30_000]), ("b".into(), vec![10_000])]));
        let taken = decide(
            &input(weights, r#"{"tokens": 40000}"#),
            &tables.map(|(n, d, t)| (n.to_owned(), table(d, t))).into(),
            true,
        );
        let epochs: Vec<f64> = taken.unwrap().values().map(|taken| taken.epochs).collect();
        assert_eq!(epochs, [3.0, 2.0]);
    }

    #[test]
    fn without_weights_each_table_has_its_own_amount() {
        let tables = r#"{"a": {"tokens": 2500}, "b": {"epochs": 2.5}, "c": {}}"#;
        let counts = counted(&input(tables, "null"), &[("a", 1000, 10), ("b", 100, 10), ("c", 7, 3)]).unwrap();
        assert_eq!(
            counts,
            BTreeMap::from([("a".into(), vec![2_500]), ("b".into(), vec![2_500]), ("c".into(), vec![21])])
        );
    }

    #[test]
    fn stages_go_on_where_the_one_before_ended() {
        let stages = r#"{"stages": [{"share": 3, "weights": {"a": 1}}, {"share": 1, "weights": {"a": 1, "b": 1}}]}"#;
        let input = input(r#"{"a": {}, "b": {}}"#, stages);
        let counts = counted(&input, &[("a", 700, 10), ("b", 500, 10)]).unwrap();
        // 7/8 of the mixture are from `a`, which is read once
        assert_eq!(counts, BTreeMap::from([("a".into(), vec![6_000, 1_000]), ("b".into(), vec![0, 1_000])]));
    }

    #[test]
    fn what_cannot_be_mixed_is_told_by_table() {
        let weights = r#"{"a": {"weight": 1}, "b": {"weight": 1}}"#;
        let of = |mixture: &str, b: (u64, u64)| {
            counted(&input(weights, mixture), &[("a", 100, 10), ("b", b.0, b.1)]).unwrap_err()
        };
        assert!(of("null", (3, 0)).starts_with("b has no tokens in its 3 documents"));
        let often = of(r#"{"tokens": 100000}"#, (1, 10));
        assert!(
            often.starts_with("b would be read 5000 times: it has 10 tokens, and the mixture takes 50000"),
            "{often}"
        );
        let few = of(r#"{"tokens": 100}"#, (2, 1_000));
        assert!(
            few.starts_with("b would give none of its 2 documents: they have 2000 tokens, and the mixture takes 50"),
            "{few}"
        );
    }

    #[test]
    fn a_whole_number_of_epochs_takes_documents_without_tokens_too() {
        let mut table = table(10, 7);
        table.add(u64::MAX, 0, 1);
        let input = input(r#"{"a": {"weight": 0.1}}"#, "null");
        let taken = decide(&input, &BTreeMap::from([("a".to_owned(), table)]), false).unwrap();
        assert_eq!(taken["a"].stages_of(u64::MAX).collect::<Vec<_>>(), [0]);
    }
}
