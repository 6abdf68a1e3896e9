//! Refuses clauses that the SQL parser accepts and DataFusion does not execute.
//!
//! sqlparser reads the union of many dialects. DataFusion plans a part of it, answers "not implemented" to another
//! part, and silently drops the rest: `SELECT text FROM input TABLESAMPLE (10 PERCENT)` returned all rows.
//!
//! So this module destructures every struct of the syntax tree field by field, without `..`: either DataFusion's
//! planner reads a field, or the field must be empty. A version of sqlparser with a new field does not compile until
//! somebody decides about it.
//!
//! DataFusion itself refuses some nodes by name (`PIVOT`, `TOP`, `FETCH`, `LATERAL VIEW`). This module refuses them too
//! if they are in a struct that it destructures anyway.

use std::ops::ControlFlow;

use datafusion::sql::sqlparser::ast::{
    DataType, DuplicateTreatment, Expr, Function, FunctionArg, FunctionArgumentClause, FunctionArgumentList,
    FunctionArguments, GroupByExpr, Ident, Join, JoinOperator, LimitClause, OrderBy, OrderByExpr, OrderByKind,
    PipeOperator, Query, Select, SelectItem, SetExpr, Statement, TableAlias, TableFactor, TableFunctionArgs,
    TableSampleKind, TableWithJoins, Visit, Visitor, WildcardAdditionalOptions, WindowSpec, WindowType, With,
};

/// The kind of function that a name stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FunctionKind {
    Scalar,
    Aggregate,
    Window,
}

/// Returns the first clause of a statement that DataFusion would accept and drop: its name, and its text.
pub(super) fn ignored_clause(
    statement: &Statement,
    kind: &dyn Fn(&str, bool) -> Option<FunctionKind>,
) -> Option<String> {
    let mut check = ClauseCheck { kind, named_windows_planned: 0 };
    match statement.visit(&mut check) {
        ControlFlow::Break(clause) => Some(clause),
        ControlFlow::Continue(()) => None,
    }
}

type Outcome = ControlFlow<String>;

const CONTINUE: Outcome = ControlFlow::Continue(());

/// Breaks with the name of a clause if it is present.
fn refuse_if(is_there: bool, clause: impl Into<String>) -> Outcome {
    if is_there { ControlFlow::Break(clause.into()) } else { CONTINUE }
}

struct ClauseCheck<'a> {
    kind: &'a dyn Fn(&str, bool) -> Option<FunctionKind>,
    /// Depth of projections whose named windows DataFusion replaces by their definitions; it does so only in
    /// projections.
    named_windows_planned: usize,
}

impl Visitor for ClauseCheck<'_> {
    type Break = String;

    fn pre_visit_query(&mut self, query: &Query) -> Outcome {
        let Query {
            with,
            body,
            order_by,
            limit_clause,
            fetch,
            locks,
            for_clause,
            settings,
            format_clause,
            pipe_operators,
        } = query;
        if let Some(with) = with {
            check_with(with)?;
        }
        if let Some(order_by) = order_by {
            check_order_by(order_by, body)?;
            refuse_if(names_a_window(order_by), "a named window in ORDER BY")?;
        }
        match limit_clause {
            Some(LimitClause::LimitOffset { limit: _, offset: _, limit_by }) => {
                refuse_if(!limit_by.is_empty(), "LIMIT … BY")?;
            }
            Some(LimitClause::OffsetCommaLimit { offset: _, limit: _ }) | None => {}
        }
        refuse_if(fetch.is_some(), "FETCH")?;
        refuse_if(!locks.is_empty(), locks.first().map_or(String::new(), ToString::to_string))?;
        refuse_if(for_clause.is_some(), for_clause.as_ref().map_or(String::new(), ToString::to_string))?;
        refuse_if(settings.is_some(), "SETTINGS")?;
        refuse_if(format_clause.is_some(), "FORMAT")?;
        for operator in pipe_operators {
            check_pipe(operator)?;
        }
        // nested parts are visited as expressions, queries and selects of their own
        match &**body {
            SetExpr::Select(_) | SetExpr::Query(_) | SetExpr::Values(_) | SetExpr::SetOperation { .. } => CONTINUE,
            SetExpr::Insert(_) | SetExpr::Update(_) | SetExpr::Delete(_) | SetExpr::Merge(_) => {
                ControlFlow::Break("a statement that changes a table".into())
            }
            SetExpr::Table(_) => ControlFlow::Break("TABLE".into()),
        }
    }

    fn pre_visit_select(&mut self, select: &Select) -> Outcome {
        let Select {
            select_token: _,
            optimizer_hints,
            distinct: _,
            select_modifiers,
            top,
            top_before_distinct: _,
            projection,
            exclude,
            into,
            from,
            lateral_views,
            prewhere,
            selection,
            connect_by,
            group_by,
            cluster_by,
            distribute_by,
            sort_by,
            having,
            named_window,
            qualify,
            window_before_qualify: _,
            value_table_mode,
            flavor: _,
        } = select;
        refuse_if(!optimizer_hints.is_empty(), "an optimizer hint")?;
        if let Some(modifiers) = select_modifiers {
            refuse_if(true, modifiers.to_string().trim().to_owned())?;
        }
        refuse_if(top.is_some(), "TOP")?;
        for item in projection {
            check_item(item)?;
        }
        refuse_if(exclude.is_some(), "EXCLUDE after the columns")?;
        refuse_if(into.is_some(), "INTO")?;
        for table in from {
            check_joins(table)?;
        }
        refuse_if(!lateral_views.is_empty(), "LATERAL VIEW")?;
        refuse_if(prewhere.is_some(), "PREWHERE")?;
        refuse_if(!connect_by.is_empty(), "CONNECT BY or START WITH")?;
        let modifiers = match group_by {
            GroupByExpr::All(modifiers) | GroupByExpr::Expressions(_, modifiers) => modifiers,
        };
        if let Some(modifier) = modifiers.first() {
            refuse_if(true, format!("GROUP BY … {modifier}"))?;
        }
        refuse_if(!cluster_by.is_empty(), "CLUSTER BY")?;
        refuse_if(!distribute_by.is_empty(), "DISTRIBUTE BY")?;
        refuse_if(!sort_by.is_empty(), "SORT BY")?;
        refuse_if(value_table_mode.is_some(), "AS STRUCT or AS VALUE")?;
        for window in named_window {
            refuse_if(names_a_window(window), "a named window that is defined by another one")?;
        }
        let elsewhere = [names_a_window(selection), names_a_window(group_by), names_a_window(having)];
        refuse_if(elsewhere.contains(&true) || names_a_window(qualify), "a named window outside of the columns")?;
        self.named_windows_planned += 1;
        CONTINUE
    }

    fn post_visit_select(&mut self, _select: &Select) -> Outcome {
        self.named_windows_planned -= 1;
        CONTINUE
    }

    fn pre_visit_table_factor(&mut self, factor: &TableFactor) -> Outcome {
        match factor {
            TableFactor::Table {
                name,
                alias,
                args,
                with_hints,
                version,
                with_ordinality,
                partitions,
                json_path,
                sample,
                index_hints,
            } => {
                if let Some(TableFunctionArgs { args, settings }) = args {
                    refuse_if(settings.is_some(), "SETTINGS")?;
                    refuse_if(name.0.len() > 1, format!("the table function {name} with a schema"))?;
                    refuse_if(args.iter().any(is_named), "a named argument of a table function")?;
                }
                if let Some(version) = version {
                    refuse_if(true, version.to_string())?;
                }
                if let Some(sample) = sample {
                    refuse_if(true, sample_clause(sample))?;
                }
                refuse_if(!with_hints.is_empty(), "WITH (…) after a table")?;
                refuse_if(*with_ordinality, "WITH ORDINALITY")?;
                refuse_if(!partitions.is_empty(), "PARTITION (…)")?;
                refuse_if(json_path.is_some(), "a JSON path after a table")?;
                refuse_if(!index_hints.is_empty(), "an index hint")?;
                check_alias(alias.as_ref())
            }
            TableFactor::Derived { lateral: _, subquery: _, alias, sample } => {
                if let Some(sample) = sample {
                    refuse_if(true, sample_clause(sample))?;
                }
                check_alias(alias.as_ref())
            }
            TableFactor::Function { lateral: _, name: _, args, with_ordinality, alias } => {
                refuse_if(*with_ordinality, "WITH ORDINALITY")?;
                refuse_if(args.iter().any(is_named), "a named argument of a table function")?;
                check_alias(alias.as_ref())
            }
            TableFactor::UNNEST { alias, array_exprs: _, with_offset, with_offset_alias: _, with_ordinality } => {
                refuse_if(*with_offset, "WITH OFFSET")?;
                refuse_if(*with_ordinality, "WITH ORDINALITY")?;
                check_alias(alias.as_ref())
            }
            TableFactor::NestedJoin { table_with_joins, alias } => {
                check_joins(table_with_joins)?;
                check_alias(alias.as_ref())
            }
            TableFactor::TableFunction { .. } => ControlFlow::Break("TABLE(…)".into()),
            TableFactor::JsonTable { .. } => ControlFlow::Break("JSON_TABLE".into()),
            TableFactor::OpenJsonTable { .. } => ControlFlow::Break("OPENJSON".into()),
            TableFactor::Pivot { .. } => ControlFlow::Break("PIVOT".into()),
            TableFactor::Unpivot { .. } => ControlFlow::Break("UNPIVOT".into()),
            TableFactor::MatchRecognize { .. } => ControlFlow::Break("MATCH_RECOGNIZE".into()),
            TableFactor::XmlTable { .. } => ControlFlow::Break("XMLTABLE".into()),
            TableFactor::SemanticView { .. } => ControlFlow::Break("SEMANTIC_VIEW".into()),
        }
    }

    fn pre_visit_expr(&mut self, expr: &Expr) -> Outcome {
        match expr {
            Expr::Function(function) => self.check_function(function),
            Expr::Cast { data_type, .. } => check_type(data_type),
            Expr::TypedString(typed) => check_type(&typed.data_type),
            // DataFusion reads or refuses every field of the others; their nested parts are visited
            _ => CONTINUE,
        }
    }
}

impl ClauseCheck<'_> {
    fn check_function(&self, function: &Function) -> Outcome {
        let Function { name, uses_odbc_syntax: _, parameters, args, filter, null_treatment, over, within_group } =
            function;
        let called = name.to_string();
        refuse_if(*parameters != FunctionArguments::None, format!("parameters before the arguments of {called}"))?;
        let (distinct, clauses) = match args {
            FunctionArguments::None => (&None, &[][..]),
            FunctionArguments::Subquery(_) => {
                return ControlFlow::Break(format!("a query as the argument of {called}"));
            }
            FunctionArguments::List(FunctionArgumentList { duplicate_treatment, args: _, clauses }) => {
                (duplicate_treatment, clauses.as_slice())
            }
        };
        let is_distinct = *distinct == Some(DuplicateTreatment::Distinct);
        let nulls = null_treatment.is_some()
            || clauses.iter().any(|c| matches!(c, FunctionArgumentClause::IgnoreOrRespectNulls(_)));
        match over {
            None => {}
            Some(WindowType::NamedWindow(window)) => {
                refuse_if(self.named_windows_planned == 0, format!("OVER {window} outside of the columns"))?;
            }
            Some(WindowType::WindowSpec(spec)) => check_window(spec)?,
        }
        match (self.kind)(&called, over.is_some()) {
            Some(FunctionKind::Scalar) => {
                let clause = |clause: &str| format!("{clause} of {called}(), which is no aggregate");
                refuse_if(is_distinct, clause("DISTINCT"))?;
                refuse_if(filter.is_some(), clause("FILTER"))?;
                refuse_if(over.is_some(), clause("OVER"))?;
                refuse_if(nulls, clause("IGNORE or RESPECT NULLS"))?;
                refuse_if(!within_group.is_empty(), clause("WITHIN GROUP"))?;
                refuse_if(!clauses.is_empty(), clause("a clause among the arguments"))
            }
            Some(FunctionKind::Window) => {
                let clause = |clause: &str| format!("{clause} of the window function {called}()");
                refuse_if(is_distinct, clause("DISTINCT"))?;
                refuse_if(filter.is_some(), clause("FILTER"))?;
                let takes_nulls = ["lag", "lead", "first_value", "last_value", "nth_value"];
                refuse_if(
                    nulls && !takes_nulls.contains(&called.to_lowercase().as_str()),
                    clause("IGNORE or RESPECT NULLS"),
                )
            }
            Some(FunctionKind::Aggregate) => {
                refuse_if(nulls && over.is_some(), format!("IGNORE or RESPECT NULLS of {called}() with OVER"))
            }
            // DataFusion reports that the function does not exist
            None => CONTINUE,
        }
    }
}

fn check_with(with: &With) -> Outcome {
    let With { with_token: _, recursive: _, cte_tables } = with;
    for table in cte_tables {
        refuse_if(table.from.is_some(), "FROM after a query of WITH")?;
        if let Some(materialized) = &table.materialized {
            refuse_if(true, materialized.to_string())?;
        }
        check_alias(Some(&table.alias))?;
    }
    CONTINUE
}

fn check_order_by(order_by: &OrderBy, body: &SetExpr) -> Outcome {
    let OrderBy { kind, interpolate } = order_by;
    refuse_if(interpolate.is_some(), "INTERPOLATE")?;
    match kind {
        OrderByKind::All(_) => refuse_if(!matches!(body, SetExpr::Select(_)), "ORDER BY ALL of more than one SELECT"),
        OrderByKind::Expressions(keys) => keys.iter().try_for_each(check_key),
    }
}

fn check_key(key: &OrderByExpr) -> Outcome {
    let OrderByExpr { expr: _, options: _, with_fill } = key;
    refuse_if(with_fill.is_some(), "WITH FILL")
}

fn check_window(spec: &WindowSpec) -> Outcome {
    let WindowSpec { window_name, partition_by: _, order_by, window_frame: _ } = spec;
    refuse_if(window_name.is_some(), "a window that is defined by another one")?;
    order_by.iter().try_for_each(check_key)
}

fn check_item(item: &SelectItem) -> Outcome {
    match item {
        SelectItem::UnnamedExpr(_) | SelectItem::ExprWithAlias { expr: _, alias: _ } => CONTINUE,
        SelectItem::ExprWithAliases { expr: _, aliases: _ } => ControlFlow::Break("several names of one column".into()),
        SelectItem::QualifiedWildcard(_, options) | SelectItem::Wildcard(options) => {
            let WildcardAdditionalOptions {
                wildcard_token: _,
                opt_ilike: _,
                opt_exclude: _,
                opt_except: _,
                opt_replace: _,
                opt_rename,
                opt_alias,
            } = options;
            refuse_if(opt_rename.is_some(), "RENAME after *")?;
            refuse_if(opt_alias.is_some(), "AS after *")
        }
    }
}

fn check_joins(table: &TableWithJoins) -> Outcome {
    let TableWithJoins { relation: _, joins } = table;
    joins.iter().try_for_each(check_join)
}

fn check_join(join: &Join) -> Outcome {
    let Join { relation: _, global, join_operator } = join;
    refuse_if(*global, "GLOBAL")?;
    match join_operator {
        JoinOperator::Join(_)
        | JoinOperator::Inner(_)
        | JoinOperator::Left(_)
        | JoinOperator::LeftOuter(_)
        | JoinOperator::Right(_)
        | JoinOperator::RightOuter(_)
        | JoinOperator::FullOuter(_)
        | JoinOperator::CrossJoin(_)
        | JoinOperator::LeftSemi(_)
        | JoinOperator::RightSemi(_)
        | JoinOperator::LeftAnti(_)
        | JoinOperator::RightAnti(_) => CONTINUE,
        JoinOperator::Semi(_) => ControlFlow::Break("SEMI JOIN without LEFT or RIGHT".into()),
        JoinOperator::Anti(_) => ControlFlow::Break("ANTI JOIN without LEFT or RIGHT".into()),
        JoinOperator::CrossApply | JoinOperator::OuterApply => ControlFlow::Break("APPLY".into()),
        JoinOperator::AsOf { .. } => ControlFlow::Break("ASOF JOIN".into()),
        JoinOperator::StraightJoin(_) => ControlFlow::Break("STRAIGHT_JOIN".into()),
        JoinOperator::ArrayJoin | JoinOperator::LeftArrayJoin | JoinOperator::InnerArrayJoin => {
            ControlFlow::Break("ARRAY JOIN".into())
        }
    }
}

fn check_alias(alias: Option<&TableAlias>) -> Outcome {
    let Some(TableAlias { explicit: _, name: _, columns, at }) = alias else { return CONTINUE };
    refuse_if(at.is_some(), "AT after a table")?;
    refuse_if(columns.iter().any(|column| column.data_type.is_some()), "the type of a column after a table's name")
}

fn check_pipe(operator: &PipeOperator) -> Outcome {
    match operator {
        PipeOperator::Limit { .. }
        | PipeOperator::Where { .. }
        | PipeOperator::As { .. }
        | PipeOperator::Union { .. }
        | PipeOperator::Intersect { .. }
        | PipeOperator::Except { .. } => CONTINUE,
        PipeOperator::OrderBy { exprs } => exprs.iter().try_for_each(check_key),
        PipeOperator::Select { exprs } | PipeOperator::Extend { exprs } => exprs.iter().try_for_each(check_item),
        PipeOperator::Aggregate { full_table_exprs, group_by_expr } => {
            let ordered = full_table_exprs
                .iter()
                .chain(group_by_expr)
                .any(|e| e.order_by.asc.is_some() || e.order_by.nulls_first.is_some());
            refuse_if(ordered, "ASC or DESC in |> AGGREGATE")
        }
        PipeOperator::Join(join) => check_join(join),
        PipeOperator::Set { .. }
        | PipeOperator::Drop { .. }
        | PipeOperator::TableSample { .. }
        | PipeOperator::Rename { .. }
        | PipeOperator::Call { .. }
        | PipeOperator::Pivot { .. }
        | PipeOperator::Unpivot { .. } => ControlFlow::Break(format!("|> {operator}")),
    }
}

/// Refuses types whose length DataFusion drops: `CAST('abc' AS VARCHAR(2))` would be 'abc', `FLOAT(53)` would have 32
/// bits.
fn check_type(data_type: &DataType) -> Outcome {
    let has_length = match data_type {
        DataType::Varchar(length) | DataType::Char(length) => length.is_some(),
        DataType::String(length) => length.is_some(),
        DataType::Float(info) => *info != datafusion::sql::sqlparser::ast::ExactNumberInfo::None,
        DataType::TinyInt(width)
        | DataType::SmallInt(width)
        | DataType::Int2(width)
        | DataType::Int(width)
        | DataType::Integer(width)
        | DataType::Int4(width)
        | DataType::BigInt(width)
        | DataType::Int8(width)
        | DataType::TinyIntUnsigned(width)
        | DataType::SmallIntUnsigned(width)
        | DataType::Int2Unsigned(width)
        | DataType::IntUnsigned(width)
        | DataType::IntegerUnsigned(width)
        | DataType::Int4Unsigned(width)
        | DataType::BigIntUnsigned(width)
        | DataType::Int8Unsigned(width) => width.is_some(),
        _ => false,
    };
    refuse_if(has_length, format!("the length of the type {data_type}"))
}

fn sample_clause(sample: &TableSampleKind) -> String {
    match sample {
        TableSampleKind::BeforeTableAlias(sample) | TableSampleKind::AfterTableAlias(sample) => {
            sample.to_string().trim().to_owned()
        }
    }
}

fn is_named(argument: &FunctionArg) -> bool {
    !matches!(argument, FunctionArg::Unnamed(_))
}

/// Whether a part of a query has a function over a named window.
fn names_a_window(part: &impl Visit) -> bool {
    struct Named;
    impl Visitor for Named {
        type Break = ();

        fn pre_visit_expr(&mut self, expr: &Expr) -> ControlFlow<()> {
            let named = |over: &Option<WindowType>| matches!(over, Some(WindowType::NamedWindow(Ident { .. })));
            match expr {
                Expr::Function(function) if named(&function.over) => ControlFlow::Break(()),
                _ => ControlFlow::Continue(()),
            }
        }
    }
    part.visit(&mut Named).is_break()
}
