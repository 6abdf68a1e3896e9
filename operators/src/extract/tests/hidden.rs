//! Tests that the hidden states at each position are those of the input before it, for any order of runs and slices.

use stillhouse_schemas::spec::NoisePrecision;

use super::super::hidden::{HiddenConfig, StoredStates, check};
use super::*;

const WIDTH: usize = 3;

/// A teacher whose state of layer k at a token is `[1000·k + token, its position in the run, scale]`.
struct Keeping {
    teacher: HostTeacherAdapter<HashTeacher>,
    info: TeacherInfo,
    scale: f32,
}

impl Keeping {
    fn new(scale: f32) -> Self {
        let info = TeacherInfo { hidden_size: WIDTH, layers: 2, ..info(VOCAB) };
        Self { teacher: HostTeacherAdapter(HashTeacher(super::info(VOCAB))), info, scale }
    }
}

impl Teacher for Keeping {
    fn info(&self) -> &TeacherInfo {
        &self.info
    }

    fn slice_rows(&self) -> usize {
        3
    }

    fn buffer(&self) -> stillhouse_teacher::Result<Logits> {
        self.teacher.buffer()
    }

    fn pass(&self, runs: &Runs) -> stillhouse_teacher::Result<Hidden> {
        self.teacher.pass(runs)
    }

    fn pass_with_states(&self, runs: &Runs, layers: &[usize]) -> stillhouse_teacher::Result<(Hidden, Vec<f32>)> {
        let of = |(i, token): (usize, &u32)| {
            let state = |layer: &usize| [(1000 * layer) as f32 + *token as f32, i as f32, self.scale];
            layers.iter().flat_map(state).collect::<Vec<_>>()
        };
        Ok((self.pass(runs)?, runs.iter().flat_map(|run| run.iter().enumerate().flat_map(of)).collect()))
    }

    fn slice(&self, hidden: &Hidden, tokens: &[u32], logits: &mut Logits) -> stillhouse_teacher::Result<()> {
        self.teacher.slice(hidden, tokens, logits)
    }
}

fn keeping(context: TeacherContext, precision: NoisePrecision, rows: RowLength) -> ExtractConfig {
    let hidden = Some(HiddenConfig { layers: vec![2, 0], width: WIDTH, precision });
    ExtractConfig { hidden, ..config(context, None, 0, rows) }
}

fn made(config: &ExtractConfig, data: &RecordBatch, scale: f32) -> Result<RecordBatch, OperatorError> {
    let teacher: Option<Arc<dyn Teacher>> = Some(Arc::new(Keeping::new(scale)));
    let mut operator = config.build(&SplitContext { teacher, ..context(Place::Cpu) })?;
    let mut out = None;
    operator.process(data, &mut |batch| {
        out = Some(batch);
        Ok(())
    })?;
    Ok(out.unwrap())
}

#[test]
fn a_position_has_the_states_that_it_is_predicted_from() {
    let rows = RowLength::UpTo(7);
    // two documents, the first with a leading BOS; then a short row, and one with padding
    let data = [(vec![BOS, 3, 4, 5, 9, 2, 7], vec![0, 4], 7), (vec![8, 1], vec![0], 2), (vec![6, 5, 0, 0], vec![0], 2)];
    for (precision, context) in [
        (NoisePrecision::F16, TeacherContext::Sequence),
        (NoisePrecision::F32, TeacherContext::Sequence),
        (NoisePrecision::F32, TeacherContext::Document),
    ] {
        let config = keeping(context, precision, rows);
        let out = made(&config, &batch(rows, &data, PackMode::Pad), 0.5).unwrap();
        let field = out.schema().field_with_name(columns::HIDDEN_STATES).unwrap().clone();
        assert_eq!(field.metadata()[columns::SHAPE], "[*,2,3]");
        let stored = StoredStates::of(config.hidden.as_ref(), &out).unwrap().unwrap();
        for (row, (tokens, offsets, valid)) in data.iter().enumerate() {
            let starts: &[i32] = if context == TeacherContext::Document { offsets } else { &[0] };
            for position in 0..tokens.len() {
                let start = starts.iter().map(|start| *start as usize).rfind(|start| *start <= position).unwrap();
                let given = tokens[start] == BOS;
                let want = match (position.checked_sub(start), given) {
                    _ if position >= *valid => [0.0; 6],
                    (Some(0), true) => [0.0; 6],
                    (Some(0), false) => [2000.0 + BOS as f32, 0.0, 0.5, BOS as f32, 0.0, 0.5],
                    (Some(i), _) => {
                        let (before, place) = (tokens[position - 1] as f32, (i - usize::from(given)) as f32);
                        [2000.0 + before, place, 0.5, before, place, 0.5]
                    }
                    (None, _) => unreachable!(),
                };
                assert_eq!(stored.at(row, position), want, "{context:?} row {row} position {position}");
            }
        }
        let mut violations = Vec::new();
        check(&config, &out, &mut violations).unwrap();
        assert_eq!(violations, []);
        let shown = crate::config::OperatorConfig::view(&config, &out.slice(1, 1)).unwrap().unwrap();
        assert!(shown.facts.contains(&("hidden states".into(), "2 of width 3".into())), "{:?}", shown.facts);
        assert_eq!(shown.tokens.len(), 2);
        assert!(shown.tokens[1].starts_with("|h2| 2008."), "{:?}", shown.tokens);
        // means exclude given positions and padding: in row 0 only the first position is given, in both contexts
        let shown = crate::config::OperatorConfig::view(&config, &out.slice(0, 1)).unwrap().unwrap();
        let Chart::Strip { values, .. } = &shown.pictures[0] else { panic!("{:?}", shown.pictures) };
        assert_eq!(values.iter().map(Option::is_some).collect::<Vec<_>>(), [false, true, true, true, true, true, true]);
        let mean = values.iter().flatten().map(|v| f64::from(*v)).sum::<f64>() / 6.0;
        let fact = ("mean length of the state of layer 2".to_owned(), format!("{mean:.2}"));
        assert!(shown.facts.contains(&fact), "{fact:?} {:?}", shown.facts);
    }
}

#[test]
fn values_that_a_type_cannot_hold_end_as_one_error() {
    let rows = RowLength::Fixed(3);
    let data = batch(rows, &[(vec![BOS, 3, 4], vec![0], 3)], PackMode::Wrap);
    for (precision, scale, says) in [
        (NoisePrecision::F16, 7e4, "component 2 of the hidden state of layer 2 is 70000, f16 holds up to 65504; set"),
        (NoisePrecision::F16, f32::NAN, "is NaN, not a finite number"),
        (NoisePrecision::F32, f32::INFINITY, "is inf, not a finite number"),
    ] {
        let e = made(&keeping(TeacherContext::Sequence, precision, rows), &data, scale).unwrap_err().to_string();
        assert!(e.contains(says) && e.contains(", position 1: component"), "{e}");
    }
    assert!(made(&keeping(TeacherContext::Sequence, NoisePrecision::F32, rows), &data, 7e4).is_ok());
}

#[test]
fn rows_that_are_made_at_once_are_bounded() {
    let rows = RowLength::Fixed(1024);
    let mut config = keeping(TeacherContext::Sequence, NoisePrecision::F16, rows);
    config.hidden.as_mut().unwrap().width = 4096;
    // 4 bytes · 2 layers · 4,096 · 1,024
    assert_eq!(config.max_rows_per_part(), 2);
    config.hidden.as_mut().unwrap().width = 1 << 20;
    assert_eq!(config.max_rows_per_part(), 1);
    let wide = config.build(&context(Place::Cpu)).err().unwrap().to_string();
    assert!(wide.contains("hidden states are 1 wide, the job's 1048576"), "{wide}");
}
