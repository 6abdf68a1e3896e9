//! Rotary position embeddings, in the half-split layout of Hugging Face checkpoints (Su et al. 2021), and all scalings
//! of their frequencies that configurations name.
//!
//! ```text
//! a head of D dimensions, R of them rotated:  a_0 … a_R/2-1 | b_0 … b_R/2-1 | the rest, unchanged
//! a_i, b_i  ─►  a_i cos − b_i sin,  b_i cos + a_i sin       with the angle position · f_i,   f_i = theta^(−2i/R), scaled
//! ```

use serde_json::Value;

use crate::config_file::ConfigFile;
use crate::error::Result;

/// Positions whose cosines and sines are always computed; longer sequences extend the tables.
const FIRST_POSITIONS: usize = 1024;

/// The rotation of one kind of layer.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Rope {
    /// The angle per position of each pair.
    frequencies: Vec<f32>,
    /// Length in tokens beyond which other frequencies apply, and these frequencies (LongRoPE).
    long: Option<(usize, Vec<f32>)>,
    /// Factor of cosines and sines.
    factor: f32,
}

/// Cosines and sines `[positions, R/2]`, as far as they have been computed.
#[derive(Debug, Default)]
pub(crate) struct Tables {
    pub cos: Vec<f32>,
    pub sin: Vec<f32>,
}

/// The fields of a configuration that describe the rotation.
pub(crate) struct RopeFields<'a> {
    pub config: &'a ConfigFile,
    /// Path of the object with `rope_type`: `rope_parameters`, `rope_scaling`, or an object inside one of these.
    pub group: String,
    /// Default of the base theta.
    pub theta: f64,
    /// Number of rotated dimensions.
    pub rotated: usize,
    /// Default of the context length before scaling; `None` for `max_position_embeddings`.
    pub original_context: Option<f64>,
    /// Whether `yarn` means LongRoPE, as in Phi-3.
    pub yarn_is_longrope: bool,
}

impl<'a> RopeFields<'a> {
    /// Fields of most configurations: `rope_theta` and `rope_scaling`, or both in `rope_parameters`.
    pub(crate) fn from_config(config: &'a ConfigFile, rotated: usize) -> Self {
        let group = if config.get("rope_parameters").is_some() { "rope_parameters" } else { "rope_scaling" };
        Self { config, group: group.into(), theta: 10_000.0, rotated, original_context: None, yarn_is_longrope: false }
    }

    fn path(&self, name: &str) -> String {
        format!("{}.{name}", self.group)
    }

    fn has(&self, name: &str) -> bool {
        self.config.get(&self.path(name)).is_some()
    }

    fn theta(&self) -> Result<f64> {
        let inside = self.path("rope_theta");
        let field = if self.config.get(&inside).is_some() { inside } else { "rope_theta".into() };
        self.config.float_or(&field, self.theta)
    }

    fn number(&self, name: &str) -> Result<f64> {
        let field = self.path(name);
        match self.config.get(&field) {
            Some(_) => self.config.float_or(&field, 1.0),
            None => Err(self.config.invalid(&field, "a number above 0")),
        }
    }

    fn number_or(&self, name: &str, default: f64) -> Result<f64> {
        if self.has(name) { self.number(name) } else { Ok(default) }
    }

    fn factors(&self, name: &str) -> Result<Vec<f64>> {
        let (field, count) = (self.path(name), self.rotated / 2);
        let list = self.config.get(&field).and_then(Value::as_array);
        let factors: Option<Vec<f64>> = list.and_then(|list| list.iter().map(Value::as_f64).collect());
        let good = factors.filter(|all| all.len() == count && all.iter().all(|x| *x > 0.0 && x.is_finite()));
        good.ok_or_else(|| self.config.invalid(&field, &format!("{count} numbers above 0")))
    }

    /// Returns the context length before scaling. A field outside the group takes precedence over one in it.
    fn original(&self) -> Result<f64> {
        let name = "original_max_position_embeddings";
        if self.config.get(name).is_some() {
            return self.config.float_or(name, 1.0);
        }
        match (self.has(name), self.original_context) {
            (true, _) => self.number(name),
            (false, Some(original)) => Ok(original),
            (false, None) => Ok(self.config.size("max_position_embeddings")? as f64),
        }
    }

    /// Reads the rotation. `divided` divides the frequencies further (GGUF's `rope_freqs.weight`).
    pub(crate) fn read(&self, divided: Option<&[f32]>) -> Result<Rope> {
        let (theta, rotated) = (self.theta()?, self.rotated as f64);
        let base = |theta: f64| (0..self.rotated / 2).map(move |i| libm::pow(theta, -2.0 * i as f64 / rotated));
        let mut frequencies: Vec<f64> = base(theta).collect();
        let (mut factor, mut long) = (1.0, None);
        let kind = if self.has("rope_type") { self.path("rope_type") } else { self.path("type") };
        match self.config.get(&kind).and_then(Value::as_str).unwrap_or("default") {
            // `dynamic` scales only beyond max_position_embeddings, which sequences never exceed.
            "default" => {}
            "dynamic" => drop(self.number_or("factor", 1.0)?),
            "linear" => {
                let stretch = self.number("factor")?;
                frequencies.iter_mut().for_each(|f| *f /= stretch);
            }
            "llama3" => self.llama3(&mut frequencies)?,
            "yarn" if !self.yarn_is_longrope => factor = self.yarn(&mut frequencies, theta)?,
            "longrope" | "su" | "yarn" => {
                let (short, stretched) = (self.factors("short_factor")?, self.factors("long_factor")?);
                let original = self.original()?;
                let divide = |by: &[f64]| frequencies.iter().zip(by).map(|(f, by)| f / by).collect::<Vec<_>>();
                long = Some((original as usize, divide(&stretched)));
                factor = self.longrope_factor(original)?;
                frequencies = divide(&short);
            }
            _ => return Err(self.config.invalid(&kind, "default, linear, dynamic, llama3, yarn, longrope")),
        }
        let narrow = |all: Vec<f64>| -> Vec<f32> {
            let by = divided.map_or_else(|| vec![1.0; all.len()], <[f32]>::to_vec);
            all.into_iter().zip(by).map(|(f, by)| (f / f64::from(by)) as f32).collect()
        };
        let long = long.map(|(beyond, all)| (beyond, narrow(all)));
        Ok(Rope { frequencies: narrow(frequencies), long, factor: factor as f32 })
    }

    /// Returns the unscaled rotation with the base `self.theta`.
    pub(crate) fn plain(&self) -> Rope {
        let pairs = 0..self.rotated / 2;
        let frequency = |i: usize| libm::pow(self.theta, -2.0 * i as f64 / self.rotated as f64) as f32;
        Rope { frequencies: pairs.map(frequency).collect(), long: None, factor: 1.0 }
    }

    /// Llama 3.1: divides low frequencies by the factor, keeps high ones, and interpolates between them.
    fn llama3(&self, frequencies: &mut [f64]) -> Result<()> {
        let (factor, low) = (self.number("factor")?, self.number("low_freq_factor")?);
        let (high, context) = (self.number("high_freq_factor")?, self.number("original_max_position_embeddings")?);
        for f in frequencies {
            // Turns of this frequency over the context length of the pretraining.
            let turns = context * *f / std::f64::consts::TAU;
            let keep = ((turns - low) / (high - low)).clamp(0.0, 1.0);
            *f = *f * keep + *f / factor * (1.0 - keep);
        }
        Ok(())
    }

    /// YaRN (Peng et al. 2023); returns the factor of cosines and sines.
    fn yarn(&self, frequencies: &mut [f64], theta: f64) -> Result<f64> {
        let original = self.original()?;
        let factor = match self.has("factor") {
            true => self.number("factor")?,
            false => self.config.size("max_position_embeddings")? as f64 / original,
        };
        let (fast, slow) = (self.number_or("beta_fast", 32.0)?, self.number_or("beta_slow", 1.0)?);
        let rotated = self.rotated as f64;
        // Index of the pair that makes this number of turns over the original context.
        let pair =
            |turns: f64| rotated * libm::log(original / (turns * std::f64::consts::TAU)) / (2.0 * libm::log(theta));
        let whole = self.config.flag_or(&self.path("truncate"), true)?;
        let (mut low, mut high) = (pair(fast), pair(slow));
        if whole {
            (low, high) = (low.floor(), high.ceil());
        }
        let (low, mut high) = (low.max(0.0), high.min(rotated - 1.0));
        if low == high {
            high += 0.001;
        }
        for (i, f) in frequencies.iter_mut().enumerate() {
            let stretched = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
            *f = *f / factor * stretched + *f * (1.0 - stretched);
        }
        let of = |mscale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * mscale * libm::log(factor) + 1.0 };
        if self.has("attention_factor") {
            return self.number("attention_factor");
        }
        if self.has("mscale") && self.has("mscale_all_dim") {
            return Ok(of(self.number("mscale")?) / of(self.number("mscale_all_dim")?));
        }
        Ok(of(1.0))
    }

    fn longrope_factor(&self, original: f64) -> Result<f64> {
        if self.has("attention_factor") {
            return self.number("attention_factor");
        }
        let positions = self.config.size("max_position_embeddings")? as f64;
        let stretch = if self.has("factor") { self.number("factor")? } else { positions / original };
        Ok(if stretch <= 1.0 { 1.0 } else { (1.0 + libm::log(stretch) / libm::log(original)).sqrt() })
    }
}

impl Rope {
    /// Number of rotated dimensions, R.
    pub(crate) fn rotated(&self) -> usize {
        2 * self.frequencies.len()
    }

    /// Whether a sequence of `length` tokens uses the long frequencies.
    pub(crate) fn is_long(&self, length: usize) -> bool {
        self.long.as_ref().is_some_and(|(beyond, _)| length > *beyond)
    }

    /// Extends tables to at least `positions` positions.
    pub(crate) fn extend_tables(&self, tables: &mut Tables, long: bool, positions: usize) {
        let frequencies = self.long.as_ref().filter(|_| long).map_or(&self.frequencies, |(_, long)| long);
        let from = tables.cos.len() / frequencies.len().max(1);
        if positions <= from {
            return;
        }
        let to = positions.max(2 * from).max(FIRST_POSITIONS);
        for position in from..to {
            let angles = frequencies.iter().map(|f| position as f32 * f);
            tables.cos.extend(angles.clone().map(|a| libm::cosf(a) * self.factor));
            tables.sin.extend(angles.map(|a| libm::sinf(a) * self.factor));
        }
    }

    /// Returns cosines and sines of the first positions, for rotation on a device.
    pub(crate) fn tables(&self, positions: usize) -> Tables {
        let mut tables = Tables::default();
        self.extend_tables(&mut tables, false, positions);
        tables.cos.truncate(positions * self.frequencies.len());
        tables.sin.truncate(positions * self.frequencies.len());
        tables
    }
}

/// Rotates one head in place.
pub(crate) fn rotate(head: &mut [f32], cos: &[f32], sin: &[f32]) {
    let half = cos.len();
    let (a, b) = head.split_at_mut(half);
    for (((a, b), cos), sin) in a.iter_mut().zip(b).zip(cos).zip(sin) {
        (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
    }
}
