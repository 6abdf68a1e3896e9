//! Bounds on a query: the size of its text and syntax tree, and of the values that its functions create.
//!
//! Planning recurses over the syntax tree, and a stack overflow ends the process. So the tree has a bound
//! ([`check_size`]), and the query runs on a thread whose stack suffices for a tree of that size ([`on_large_stack`]).
//!
//! A few functions create values whose size an argument decides. DataFusion allocates them outside of its memory pool,
//! so `repeat(text, 2000000000)` would end the process, too ([`bounded_functions`]).

use std::hash::{Hash, Hasher};
use std::sync::Arc;

use datafusion::arrow::array::{Array, ArrayRef, AsArray, Int64Array};
use datafusion::arrow::compute::cast;
use datafusion::arrow::compute::kernels::length::length;
use datafusion::arrow::datatypes::{DataType, FieldRef, Int64Type};
use datafusion::common::{DataFusionError, Result, exec_err};
use datafusion::logical_expr::{
    ColumnarValue, Documentation, ReturnFieldArgs, ScalarFunctionArgs, ScalarUDF, ScalarUDFImpl, Signature,
};
use datafusion::prelude::SessionContext;
use datafusion::sql::sqlparser::dialect::GenericDialect;
use datafusion::sql::sqlparser::keywords::Keyword;
use datafusion::sql::sqlparser::tokenizer::{Token, Tokenizer};
use memchr::memmem;

use stillhouse_base::source_error::SourceError;

/// Maximum bytes of the text of a query.
const MAX_BYTES: usize = 1_000_000;
/// Maximum number of operators of a query, including comparisons. Each may make the tree one level deeper.
const MAX_OPERATORS: usize = 1_000;
/// Maximum number of arithmetic operators among them: DataFusion derives their types again at each level.
const MAX_ARITHMETIC: usize = 200;
/// Maximum number of references to tables in a query.
const MAX_TABLES: usize = 200;
/// Stack size in bytes. It suffices for [`MAX_OPERATORS`] levels, also in a program without optimizations. Unused
/// stack takes no memory.
const STACK_BYTES: usize = 128 << 20;
/// Maximum bytes of the values that a function creates for one batch of rows.
const MAX_VALUE_BYTES: u64 = 256 << 20;
/// Maximum bytes of a replacement text of `regexp_replace`.
const MAX_REPLACEMENT_BYTES: usize = 1_000;

/// Returns a message if a query's text is too large.
pub(super) fn check_size(sql: &str) -> Option<String> {
    if sql.len() > MAX_BYTES {
        return Some(format!(
            "the query has {} bytes; valid: at most {MAX_BYTES}; put long lists into a table and join it",
            sql.len()
        ));
    }
    // the parser reports invalid tokens with their positions
    let tokens = Tokenizer::new(&GenericDialect {}, sql).tokenize().ok()?;
    let operators = tokens.iter().filter(|token| is_operator(token)).count();
    if operators > MAX_OPERATORS {
        return Some(format!(
            "the query has {operators} operators; valid: at most {MAX_OPERATORS}; IN (…) takes a list, and long lists can be a table that is joined"
        ));
    }
    let arithmetic = tokens.iter().filter(|token| is_arithmetic(token)).count();
    if arithmetic > MAX_ARITHMETIC {
        return Some(format!("the query has {arithmetic} times + - * / %; valid: at most {MAX_ARITHMETIC} in all"));
    }
    let tables =
        tokens.iter().filter(|token| matches!(token, Token::Word(word) if TABLE_WORDS.contains(&word.keyword))).count();
    (tables > MAX_TABLES)
        .then(|| format!("the query has {tables} times FROM and JOIN; valid: at most {MAX_TABLES} in all"))
}

const TABLE_WORDS: [Keyword; 2] = [Keyword::FROM, Keyword::JOIN];

fn is_arithmetic(token: &Token) -> bool {
    matches!(token, Token::Plus | Token::Minus | Token::Mul | Token::Div | Token::Mod)
}

/// Whether a token can make the tree deeper. Parentheses cannot: the parser bounds their nesting.
fn is_operator(token: &Token) -> bool {
    match token {
        Token::Word(word) => matches!(
            word.keyword,
            Keyword::AND
                | Keyword::OR
                | Keyword::XOR
                | Keyword::NOT
                | Keyword::IS
                | Keyword::IN
                | Keyword::LIKE
                | Keyword::ILIKE
                | Keyword::SIMILAR
                | Keyword::RLIKE
                | Keyword::REGEXP
                | Keyword::BETWEEN
                | Keyword::COLLATE
                | Keyword::AT
                | Keyword::DIV
                | Keyword::UNION
                | Keyword::EXCEPT
                | Keyword::MINUS
                | Keyword::INTERSECT
                | Keyword::JOIN
                | Keyword::WITH
        ),
        Token::EOF
        | Token::Number(..)
        | Token::Comma
        | Token::Whitespace(_)
        | Token::LParen
        | Token::RParen
        | Token::Period
        | Token::SemiColon => false,
        Token::SingleQuotedString(_) | Token::DoubleQuotedString(_) => false,
        // every other token is an operator, a bracket, or a rare literal
        _ => true,
    }
}

/// Runs `work` on a thread with a large stack.
///
/// # Errors
/// When the system cannot create the thread, or the thread panics.
pub(super) fn on_large_stack<T: Send>(
    work: impl FnOnce() -> std::result::Result<T, SourceError> + Send,
) -> std::result::Result<T, SourceError> {
    let failed = |message: String| SourceError::Sql { message, retryable: true };
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("query".into()).stack_size(STACK_BYTES);
        let thread = thread.spawn_scoped(scope, work);
        let thread = thread
            .map_err(|e| failed(format!("the system gives no thread with a stack of {STACK_BYTES} bytes: {e}")))?;
        thread.join().unwrap_or_else(|_| Err(failed("the thread of the query panicked".into())))
    })
}

/// Estimates the bytes that a call creates from its arguments, or returns the reason to refuse it.
type Estimate = fn(&[ArrayRef]) -> Result<u64>;

/// Wraps the functions whose arguments decide the size of their values, to bound that size.
pub(super) fn bounded_functions(context: &SessionContext) {
    let bounds: [(&str, Estimate); 9] = [
        ("repeat", |args| repeated_bytes(args, &lengths(args, 0)?)),
        ("lpad", |args| repeated_bytes(args, &[1])),
        ("rpad", |args| repeated_bytes(args, &[1])),
        ("array_repeat", |args| repeated_bytes(args, &[bytes_of_a_row(args)])),
        ("array_resize", |args| repeated_bytes(args, &[16])),
        ("range", range_bytes),
        ("generate_series", range_bytes),
        ("replace", replace_bytes),
        ("regexp_replace", check_replacement),
    ];
    let known = context.state().scalar_functions().clone();
    for (name, estimate) in bounds {
        if let Some(inner) = known.get(name) {
            context.register_udf(ScalarUDF::new_from_impl(BoundedFunction { inner: inner.clone(), estimate }));
        }
    }
}

/// Returns an argument as integers; `None` if it is missing or not an integer.
fn integers(args: &[ArrayRef], position: usize) -> Result<Option<Int64Array>> {
    match args.get(position) {
        Some(array) if array.data_type().is_integer() => {
            Ok(Some(cast(array, &DataType::Int64)?.as_primitive::<Int64Type>().clone()))
        }
        _ => Ok(None),
    }
}

/// Returns the byte lengths of the texts of an argument.
fn lengths(args: &[ArrayRef], position: usize) -> Result<Vec<u64>> {
    let Some(array) = args.get(position) else { return Ok(Vec::new()) };
    if array.data_type().is_null() {
        return Ok(vec![0; array.len()]);
    }
    let lengths = cast(&length(array.as_ref())?, &DataType::Int64)?;
    Ok(lengths.as_primitive::<Int64Type>().iter().map(|n| n.unwrap_or(0).unsigned_abs()).collect())
}

fn bytes_of_a_row(args: &[ArrayRef]) -> u64 {
    args.first().map_or(0, |array| 8 + (array.get_array_memory_size() / array.len().max(1)) as u64)
}

/// Returns the sum over the rows of the second argument times `bytes`, which has one value per row or one for all.
fn repeated_bytes(args: &[ArrayRef], bytes: &[u64]) -> Result<u64> {
    let Some(counts) = integers(args, 1)? else { return Ok(0) };
    let bytes_of = |row: usize| bytes.get(row).or(bytes.first()).copied().unwrap_or(0);
    let sizes =
        counts.iter().enumerate().map(|(row, n)| bytes_of(row).saturating_mul(n.unwrap_or(0).max(0).unsigned_abs()));
    Ok(sizes.fold(0, u64::saturating_add))
}

/// Estimates `range(stop)`, `range(start, stop)` and `range(start, stop, step)` of integers.
fn range_bytes(args: &[ArrayRef]) -> Result<u64> {
    if args.iter().any(|array| !array.data_type().is_integer() && !array.data_type().is_null()) {
        return exec_err!("got a range of times; valid: whole numbers");
    }
    let (first, second, step) = (integers(args, 0)?, integers(args, 1)?, integers(args, 2)?);
    let Some(first) = first else { return Ok(0) };
    let at =
        |array: &Option<Int64Array>, row: usize| array.as_ref().map(|a| if a.is_null(row) { 0 } else { a.value(row) });
    let sizes = (0..first.len()).map(|row| {
        let begin = if first.is_null(row) { 0 } else { first.value(row) };
        let (start, stop) = at(&second, row).map_or((0, begin), |stop| (begin, stop));
        let step = at(&step, row).unwrap_or(1).unsigned_abs().max(1);
        (start.abs_diff(stop) / step).saturating_add(1).saturating_mul(8)
    });
    Ok(sizes.fold(0, u64::saturating_add))
}

fn to_large_utf8(array: &ArrayRef) -> Result<ArrayRef> {
    Ok(cast(array, &DataType::LargeUtf8)?)
}

/// Estimates `replace(text, from, to)`.
fn replace_bytes(args: &[ArrayRef]) -> Result<u64> {
    let [text, from, to] = args else { return Ok(0) };
    let (text, from, to) = (to_large_utf8(text)?, to_large_utf8(from)?, to_large_utf8(to)?);
    let (text, from, to) = (text.as_string::<i64>(), from.as_string::<i64>(), to.as_string::<i64>());
    let sizes = text.iter().zip(from).zip(to).map(|((text, from), to)| {
        let (Some(text), Some(from), Some(to)) = (text, from, to) else { return 0 };
        let found = match from.is_empty() {
            true => text.len() + 1,
            false if to.len() <= from.len() => 0,
            false => memmem::find_iter(text.as_bytes(), from).count(),
        };
        text.len() as u64 + (found as u64).saturating_mul(to.len() as u64)
    });
    Ok(sizes.fold(0, u64::saturating_add))
}

/// Bounds `regexp_replace(text, pattern, replacement[, flags])` by the length of the replacement: the number of matches
/// is known only afterwards.
fn check_replacement(args: &[ArrayRef]) -> Result<u64> {
    match lengths(args, 2)?.into_iter().max() {
        Some(most) if most > MAX_REPLACEMENT_BYTES as u64 => {
            exec_err!("got a replacement of {most} bytes; valid: at most {MAX_REPLACEMENT_BYTES}")
        }
        _ => Ok(0),
    }
}

/// A DataFusion function that refuses to create values of more than [`MAX_VALUE_BYTES`] bytes.
#[derive(Debug)]
struct BoundedFunction {
    inner: Arc<ScalarUDF>,
    estimate: Estimate,
}

impl PartialEq for BoundedFunction {
    fn eq(&self, other: &Self) -> bool {
        self.inner == other.inner
    }
}

impl Eq for BoundedFunction {}

impl Hash for BoundedFunction {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.inner.hash(state);
    }
}

impl ScalarUDFImpl for BoundedFunction {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn aliases(&self) -> &[String] {
        self.inner.aliases()
    }

    fn signature(&self) -> &Signature {
        self.inner.signature()
    }

    fn return_type(&self, arguments: &[DataType]) -> Result<DataType> {
        self.inner.return_type(arguments)
    }

    fn return_field_from_args(&self, arguments: ReturnFieldArgs<'_>) -> Result<FieldRef> {
        self.inner.return_field_from_args(arguments)
    }

    fn coerce_types(&self, arguments: &[DataType]) -> Result<Vec<DataType>> {
        self.inner.coerce_types(arguments)
    }

    fn documentation(&self) -> Option<&Documentation> {
        self.inner.documentation()
    }

    fn invoke_with_args(&self, arguments: ScalarFunctionArgs) -> Result<ColumnarValue> {
        let bytes = (self.estimate)(&ColumnarValue::values_to_arrays(&arguments.args)?);
        match bytes {
            Ok(bytes) if bytes <= MAX_VALUE_BYTES => self.inner.invoke_with_args(arguments),
            Ok(bytes) => exec_err!(
                "{}(): would make {bytes} bytes for {} rows; valid: at most {MAX_VALUE_BYTES}",
                self.name(),
                arguments.number_rows
            ),
            Err(DataFusionError::Execution(message)) => exec_err!("{}(): {message}", self.name()),
            Err(e) => Err(e),
        }
    }
}
