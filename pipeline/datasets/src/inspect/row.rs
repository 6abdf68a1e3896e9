//! Decodes one row for display.

use arrow::array::{BooleanArray, RecordBatch, UInt64Array};
use stillhouse_base::error::{ErrorKind, PipelineError, Result};
use stillhouse_noise::{
    Correction, DrawKey, NoiseStream, StoredToken, decode as decode_noise, prior_noise, sequential_noise,
};
use stillhouse_operators::extract::{Sequence, sequences};
use stillhouse_operators::invariants::{float_column, unsigned_column};
use stillhouse_operators::partitions::PartitionsSection;
use stillhouse_operators::registry;
use stillhouse_operators::rows::ListRows;
use stillhouse_operators::vocabulary::Vocabulary;
use stillhouse_output::TOKENIZER;
use stillhouse_schemas::columns;
use stillhouse_schemas::ids::DocumentId;
use stillhouse_schemas::manifest::{Manifest, ShardRecord};

use super::{Blueprint, BlueprintEntry, DocumentView, InspectOptions, OperatorView, RowView, Shape, TokenView};
use crate::dataset::Dataset;

/// Number of blueprints to show if no position is requested.
const DEFAULT_BLUEPRINTS: usize = 3;

pub(super) async fn decode_row(dataset: &Dataset, row: u64, options: &InspectOptions) -> Result<Option<RowView>> {
    let manifest = dataset.manifest();
    let Some((shard, offset)) = find(manifest, row)? else { return Ok(None) };
    let Some(batch) = dataset.rows(shard, offset as usize, 1).await? else { return Ok(None) };
    let vocabulary = Vocabulary::from_tokenizer(dataset.tokenizer().await?, TOKENIZER)
        .map_err(PipelineError::dataset(dataset.shown(TOKENIZER)))?;
    let view = Decoder { manifest, options, vocabulary: &vocabulary, batch: &batch };
    view.check_options()?;
    view.row(&shard.path, offset).map(Some).map_err(PipelineError::dataset(dataset.shown(&shard.path)))
}

/// Finds the shard of a row and the index of the row in it; `None` if the data set is empty.
pub(super) fn find(manifest: &Manifest, row: u64) -> Result<Option<(&ShardRecord, u64)>> {
    let mut rest = row;
    for shard in &manifest.shards {
        if rest < shard.rows {
            return Ok(Some((shard, rest)));
        }
        rest -= shard.rows;
    }
    match row - rest {
        0 => Ok(None),
        rows => Err(PipelineError::new(ErrorKind::Usage, format!("--row: got {row}, valid: 0 to {}", rows - 1))),
    }
}

/// Decodes a row that is not in a shard yet. `shard` and `row` name its future place.
pub fn decode(
    manifest: &Manifest,
    vocabulary: &Vocabulary,
    batch: &RecordBatch,
    options: &InspectOptions,
    shard: &str,
    row: u64,
) -> Result<RowView> {
    let view = Decoder { manifest, options, vocabulary, batch };
    view.row(shard, row).map_err(PipelineError::dataset(shard))
}

type Fallible<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

struct Decoder<'a> {
    manifest: &'a Manifest,
    options: &'a InspectOptions,
    vocabulary: &'a Vocabulary,
    batch: &'a RecordBatch,
}

/// The stored noise of one row.
enum StoredNoise {
    Replay {
        counts: Vec<u32>,
        indices: Vec<u32>,
        logprobs: Vec<f32>,
    },
    Dense(Vec<f32>),
    /// Noise of text that the teacher wrote: the prior's noise, which is not stored.
    Prior,
}

impl Decoder<'_> {
    /// The section `partitions` of the job.
    fn partitions(&self) -> Result<Option<PartitionsSection>> {
        let section = self.manifest.job.sections.get();
        section.map_err(|problem| PipelineError::new(ErrorKind::DataSet, format!("the job in the manifest: {problem}")))
    }

    /// Rejects views, draws and positions that do not exist, as a usage error rather than a fault of the data set.
    fn check_options(&self) -> Result<()> {
        let job = &self.manifest.job;
        let views = self.partitions()?.map_or(1, |p| p.views as usize);
        let draws = job.extract.as_ref().and_then(|e| e.noise.as_ref()).map_or(1, |n| n.draws as usize);
        let length = ListRows::from_batch(self.batch, columns::INPUT_IDS)
            .map_err(PipelineError::dataset(columns::INPUT_IDS))?
            .range(0)
            .len();
        let positions = self.options.positions.iter().map(|&p| ("--position", p, length));
        let asked = [("--view", self.options.view, views), ("--draw", self.options.draw as usize, draws)];
        match asked.into_iter().chain(positions).find(|(_, got, n)| got >= n) {
            None => Ok(()),
            Some((option, got, n)) => {
                let message = format!("{option}: got {got}, valid: 0 to {}", n.saturating_sub(1));
                Err(PipelineError::new(ErrorKind::Usage, message))
            }
        }
    }

    fn row(&self, shard: &str, row: u64) -> Fallible<RowView> {
        let sequence = sequences(self.batch)?.remove(0);
        let logprobs = match self.batch.column_by_name(columns::LOGPROB) {
            Some(_) => Some(float_column(self.batch, columns::LOGPROB)?.row(0).to_vec()),
            None => None,
        };
        let noise = self.noise()?;
        let (groups, t) = self.groups(&sequence)?;
        let digits = match self.manifest.subtokens {
            Some(_) => Some(unsigned_column(self.batch, columns::SUBTOKENS)?.row(0).to_vec()),
            None => None,
        };
        let per_token = self.manifest.subtokens.map_or(0, |s| s.length as usize);
        let tokens: Vec<TokenView> = (0..sequence.tokens.len())
            .map(|i| TokenView {
                id: sequence.tokens[i],
                text: self.vocabulary.token_text(sequence.tokens[i]),
                valid: i < sequence.valid,
                group: groups.as_ref().map(|g| g[i]),
                logprob: logprobs.as_ref().map(|l| l[i]),
                corrections: self.corrections(noise.as_ref(), &sequence, i).map(|c| c.len() as u32),
                subtokens: digits.as_ref().map_or(Vec::new(), |d| d[i * per_token..(i + 1) * per_token].to_vec()),
            })
            .collect();
        let blueprints = match (&noise, &logprobs) {
            (Some(noise), Some(logprobs)) => self.blueprints(noise, &sequence, logprobs, &tokens)?,
            _ => Vec::new(),
        };
        Ok(RowView {
            shard: shard.to_owned(),
            row,
            sequence_id: sequence.id,
            documents: self.documents(&sequence)?,
            partition_t: t,
            tokens,
            subtoken_base: self.manifest.subtokens.map(|s| s.base),
            blueprints,
            operators: self.operators()?,
            picture: self.picture(),
            numbers: self.manifest.job.input.is_rows(),
        })
    }

    fn picture(&self) -> Option<Shape> {
        let images = self.manifest.job.input.images.as_ref()?;
        let (height, width) = images.height_width();
        Some(Shape { height, width, channels: images.channels.count() })
    }

    fn operators(&self) -> Fallible<Vec<OperatorView>> {
        let (operators, _) = registry::operators_from_manifest(self.manifest);
        let views = operators.iter().map(|operator| operator.view(self.batch));
        Ok(views.filter_map(Result::transpose).collect::<std::result::Result<_, _>>()?)
    }

    fn documents(&self, sequence: &Sequence) -> Fallible<Vec<DocumentView>> {
        let ids = ListRows::from_batch(self.batch, columns::DOCUMENT_IDS)?;
        let values = ids.values::<UInt64Array>(columns::DOCUMENT_IDS)?;
        Ok(sequence
            .offsets
            .iter()
            .zip(ids.range(0))
            .map(|(&offset, i)| {
                let id = values.value(i);
                let (split, record) = DocumentId(id).parts();
                let pieces = self.manifest.splits.iter().find(|s| s.split == split).map(|s| s.pieces.as_slice());
                let file = match pieces {
                    Some([one]) => one.file.clone(),
                    Some([first, rest @ ..]) => format!("one of {} files from {} on", 1 + rest.len(), first.file),
                    _ => String::new(),
                };
                DocumentView { offset, document_id: id, record, file }
            })
            .collect())
    }

    fn groups(&self, sequence: &Sequence) -> Fallible<(Option<Vec<bool>>, Option<f32>)> {
        let Some(partitions) = self.partitions()? else { return Ok((None, None)) };
        let (view, views) = (self.options.view, partitions.views.max(1) as usize);
        let rows = ListRows::from_batch(self.batch, columns::PARTITION)?;
        let values = rows.values::<BooleanArray>(columns::PARTITION)?;
        // at digit level, a token is in group 1 if one of its digits is
        let of_view = rows.range(0).len() / views;
        let per_token = (of_view / sequence.tokens.len().max(1)).max(1);
        let groups: Vec<bool> = rows.range(0).skip(view * of_view).take(of_view).map(|i| values.value(i)).collect();
        let groups = groups.chunks(per_token).map(|digits| digits.contains(&true)).collect();
        let times = float_column(self.batch, columns::PARTITION_T)?;
        // with blocks, each block has its own t, which the operator shows
        let t = (times.row(0).len() == views).then(|| times.row(0)[view]);
        Ok((Some(groups), t))
    }

    fn noise(&self) -> Fallible<Option<StoredNoise>> {
        if self.batch.column_by_name(columns::NOISE_COUNT).is_some() {
            return Ok(Some(StoredNoise::Replay {
                counts: unsigned_column(self.batch, columns::NOISE_COUNT)?.row(0).to_vec(),
                indices: unsigned_column(self.batch, columns::NOISE_INDEX)?.row(0).to_vec(),
                logprobs: float_column(self.batch, columns::NOISE_LOGPROB)?.row(0).to_vec(),
            }));
        }
        if self.batch.column_by_name(columns::NOISE).is_some() {
            return Ok(Some(StoredNoise::Dense(float_column(self.batch, columns::NOISE)?.row(0).to_vec())));
        }
        Ok(self.manifest.job.sequential().is_some().then_some(StoredNoise::Prior))
    }

    fn corrections(
        &self,
        noise: Option<&StoredNoise>,
        sequence: &Sequence,
        position: usize,
    ) -> Option<Vec<Correction>> {
        let StoredNoise::Replay { counts, indices, logprobs } = noise? else { return None };
        let at = self.options.draw as usize * sequence.tokens.len() + position;
        let start: usize = counts[..at].iter().map(|&c| c as usize).sum();
        let range = start..start + counts[at] as usize;
        let list = indices[range.clone()].iter().zip(&logprobs[range]);
        Some(list.map(|(&index, &logprob)| Correction { index, logprob }).collect())
    }

    /// Positions to show: the requested ones. Otherwise the most likely token, then those with the most corrections or
    /// the lowest probability.
    fn chosen(&self, sequence: &Sequence, tokens: &[TokenView]) -> Vec<usize> {
        let asked = &self.options.positions;
        if !asked.is_empty() {
            return asked.clone();
        }
        let mut all: Vec<usize> = (0..sequence.valid).filter(|&i| tokens[i].logprob.is_some_and(|l| l < 0.0)).collect();
        let likely = |i: &usize| ordered(tokens[*i].logprob.unwrap_or(0.0));
        let mut chosen: Vec<usize> = all.iter().copied().max_by_key(likely).into_iter().collect();
        all.sort_by_key(|&i| (std::cmp::Reverse(tokens[i].corrections.unwrap_or(0)), likely(&i)));
        chosen.extend(
            all.into_iter().filter(|i| chosen.first() != Some(i)).take(DEFAULT_BLUEPRINTS - 1).collect::<Vec<_>>(),
        );
        chosen.sort_unstable();
        chosen
    }

    fn blueprints(
        &self,
        noise: &StoredNoise,
        sequence: &Sequence,
        logprobs: &[f32],
        tokens: &[TokenView],
    ) -> Fallible<Vec<Blueprint>> {
        let vocab = self.manifest.vocab_size as usize;
        let key = DrawKey::new(self.manifest.noise_seed.unwrap_or_default(), self.options.draw);
        let mut blueprints = Vec::new();
        for position in self.chosen(sequence, tokens) {
            let x = sequence.tokens[position];
            let stream = NoiseStream::new(key, sequence.id, position as u32);
            let mut xi = vec![0.0; vocab];
            match noise {
                StoredNoise::Dense(values) => {
                    let start = (self.options.draw as usize * sequence.tokens.len() + position) * vocab;
                    xi.copy_from_slice(&values[start..start + vocab]);
                }
                StoredNoise::Prior => sequential_noise(&stream, &mut xi),
                StoredNoise::Replay { .. } if logprobs[position] == 0.0 => prior_noise(x, &stream, &mut xi)?,
                StoredNoise::Replay { .. } => {
                    let corrections = self.corrections(Some(noise), sequence, position).unwrap_or_default();
                    let stored = StoredToken { token: x, logprob: logprobs[position], corrections: &corrections };
                    decode_noise(&stored, &stream, &mut xi)?;
                }
            }
            blueprints.push(self.blueprint(position, x, logprobs[position], &xi));
        }
        Ok(blueprints)
    }

    fn blueprint(&self, position: usize, token: u32, logprob: f32, xi: &[f32]) -> Blueprint {
        let max = xi.iter().fold(f32::NEG_INFINITY, |a, &b| a.max(b));
        let sum: f64 = xi.iter().map(|v| f64::from(v - max).exp()).sum();
        let weight = |k: usize| f64::from(xi[k] - max).exp() / sum;
        let mut order: Vec<usize> = (0..xi.len()).collect();
        order.sort_by(|&a, &b| xi[b].total_cmp(&xi[a]).then(a.cmp(&b)));
        let x = token as usize;
        Blueprint {
            position,
            token,
            text: self.vocabulary.token_text(token),
            logprob,
            xi: xi[x],
            weight: weight(x),
            rank: order.iter().position(|&k| k == x).unwrap_or(0) + 1,
            top: order
                .into_iter()
                .take(self.options.top)
                .map(|k| BlueprintEntry {
                    id: k as u32,
                    text: self.vocabulary.token_text(k as u32),
                    weight: weight(k),
                    xi: xi[k],
                })
                .collect(),
        }
    }
}

/// Maps a float to an integer key with the same order.
fn ordered(value: f32) -> i64 {
    let bits = i64::from(value.to_bits() as i32);
    if bits < 0 { i64::from(i32::MIN) - bits } else { bits }
}
