//! The dashboard and the alerts of the chart: their expressions, and what these need of a scrape.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use promql_parser::label::{MatchOp, Matcher};
use promql_parser::parser::{self, Expr, LabelModifier};
use serde_json::Value;

/// Labels that Prometheus and the chart's ServiceMonitor add to each series.
const TARGET_LABELS: [&str; 4] = ["job", "node", "instance", "metrics_path"];
/// Metrics that the scrape of a test lacks: `up` is made by Prometheus itself, and the others exist on a node
/// that requests its certificates.
const NOT_SCRAPED: [&str; 3] = [
    "up",
    "kubelet_certificate_manager_client_expiration_renew_errors",
    "kubelet_server_expiration_renew_errors",
];

/// An expression of a panel, of a variable or of a rule.
#[derive(Debug, Clone)]
pub struct Query {
    /// Kind and name of the alert, panel or variable.
    pub place: String,
    /// The expression without Grafana's variables.
    pub expr: String,
    /// Labels that the legend of the panel shows.
    pub legend: BTreeSet<String>,
}

/// A selector with the labels that its series must have.
#[derive(Debug)]
struct Selector {
    metric: String,
    matchers: Vec<Matcher>,
    labels: BTreeSet<String>,
}

/// The series of a scrape: the labels of each, by metric.
#[derive(Debug, Default)]
pub struct Scrape(BTreeMap<String, Vec<BTreeMap<String, String>>>);

/// Returns the root of the repository.
#[must_use]
pub fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Returns the alert rules of the chart.
///
/// # Panics
/// The file cannot be read or has another form.
#[must_use]
pub fn alerts() -> Vec<Value> {
    let file = yaml(&repository().join("charts/quintlet/files/alerts.yaml"));
    let groups = file["groups"].as_array().expect("a list of groups");
    groups.iter().flat_map(|group| group["rules"].as_array().expect("a list of rules")).cloned().collect()
}

/// Returns the dashboard of the chart.
///
/// # Panics
/// The file cannot be read or is not JSON.
#[must_use]
pub fn dashboard() -> Value {
    let text = std::fs::read(repository().join("charts/quintlet/files/dashboard.json"));
    serde_json::from_slice(&text.expect("the dashboard can be read")).expect("the dashboard is JSON")
}

/// Returns a YAML file.
///
/// # Panics
/// It cannot be read or is not YAML.
#[must_use]
pub fn yaml(path: &Path) -> Value {
    let text = std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_saphyr::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Returns all expressions of the dashboard and of the alerts.
///
/// # Panics
/// A panel or rule lacks a field.
#[must_use]
pub fn queries() -> Vec<Query> {
    let text = |value: &Value| value.as_str().expect("a text").to_owned();
    let mut queries: Vec<Query> = Vec::new();
    for rule in alerts() {
        let place = format!("alert {}", text(&rule["alert"]));
        queries.push(Query { place, expr: text(&rule["expr"]), legend: BTreeSet::new() });
    }
    let dashboard = dashboard();
    for panel in dashboard["panels"].as_array().expect("a list of panels") {
        for target in panel["targets"].as_array().into_iter().flatten() {
            let place = format!("panel {}", text(&panel["title"]));
            let expr = text(&target["expr"]).replace("$__rate_interval", "5m");
            queries.push(Query { place, expr, legend: braced(&text(&target["legendFormat"])) });
        }
    }
    for variable in dashboard["templating"]["list"].as_array().expect("a list of variables") {
        let query = text(&variable["query"]);
        if let Some(inner) = query.strip_prefix("label_values(").and_then(|rest| rest.strip_suffix(')')) {
            let (expr, label) = inner.rsplit_once(", ").expect("a selector and a label");
            let place = format!("variable {}", text(&variable["name"]));
            queries.push(Query { place, expr: expr.to_owned(), legend: [label.to_owned()].into() });
        }
    }
    queries
}

/// Returns the names in double braces.
fn braced(text: &str) -> BTreeSet<String> {
    text.split("{{").skip(1).filter_map(|rest| Some(rest.split_once("}}")?.0.trim().to_owned())).collect()
}

impl Scrape {
    /// Adds a page in the text format of Prometheus. A series is also a selector, so the same parser reads
    /// it.
    ///
    /// # Panics
    /// The page has another form.
    pub fn add(&mut self, page: &str) {
        for line in page.lines().filter(|line| !line.starts_with('#') && !line.is_empty()) {
            let end = line.rfind('}').map_or_else(|| line.find(' '), |brace| Some(brace + 1));
            let series = &line[..end.unwrap_or(line.len())];
            let parsed = parser::parse(series).unwrap_or_else(|e| panic!("{series}: {e}"));
            let Expr::VectorSelector(selector) = parsed else { panic!("{series} is not a series") };
            let labels = selector.matchers.matchers.into_iter().map(|m| (m.name, m.value)).collect();
            self.0.entry(selector.name.unwrap_or_default()).or_default().push(labels);
        }
    }

    /// Returns what a query needs and the scrape lacks: metrics, labels, and values of labels.
    #[must_use]
    pub fn missing(&self, query: &Query) -> Vec<String> {
        let expr = match parser::parse(&query.expr) {
            Ok(expr) => expr,
            Err(error) => return vec![format!("{}: {}: {error}", query.place, query.expr)],
        };
        let mut problems = Vec::new();
        let mut selectors = Vec::new();
        collect(&expr, &query.legend, &mut selectors);
        if let Some(kept) = kept_labels(&expr) {
            let lost = query.legend.iter().filter(|label| !kept.contains(*label));
            problems
                .extend(lost.map(|l| format!("{}: the legend shows {l}, which is aggregated", query.place)));
        }
        for selector in selectors.iter().filter(|s| !NOT_SCRAPED.contains(&s.metric.as_str())) {
            let (place, metric) = (&query.place, &selector.metric);
            let Some(series) = self.0.get(metric) else {
                problems.push(format!("{place}: no metric {metric}"));
                continue;
            };
            if !series.iter().any(|labels| selector.selects(labels)) {
                let (wanted, first) = (&selector.labels, series.first());
                problems.push(format!("{place}: no series of {metric} with {wanted:?}, but {first:?}"));
            }
        }
        problems
    }
}

impl Selector {
    /// Returns whether a series has all labels, and the values that the selector asks for. A value that is
    /// excluded may be the only one on a healthy node.
    fn selects(&self, series: &BTreeMap<String, String>) -> bool {
        let is_target = |name: &str| TARGET_LABELS.contains(&name);
        self.labels.iter().all(|name| is_target(name) || series.contains_key(name))
            && self.matchers.iter().filter(|m| !is_target(&m.name)).all(|m| {
                series.get(&m.name).is_some_and(|value| match m.op {
                    MatchOp::Equal | MatchOp::Re(_) => m.is_match(value),
                    MatchOp::NotEqual | MatchOp::NotRe(_) => true,
                })
            })
    }
}

fn labels_of(modifier: Option<&LabelModifier>) -> BTreeSet<String> {
    modifier.into_iter().flat_map(|m| m.labels().labels.clone()).collect()
}

/// Collects the selectors of an expression. `labels` are those that the expressions around it name.
fn collect(expr: &Expr, labels: &BTreeSet<String>, out: &mut Vec<Selector>) {
    let with = |more: BTreeSet<String>| labels.union(&more).cloned().collect::<BTreeSet<_>>();
    match expr {
        Expr::Aggregate(a) => collect(&a.expr, &with(labels_of(a.modifier.as_ref())), out),
        Expr::Unary(u) => collect(&u.expr, labels, out),
        Expr::Binary(b) => {
            let matching = b.modifier.as_ref().and_then(|m| m.matching.as_ref());
            let labels = with(labels_of(matching));
            collect(&b.lhs, &labels, out);
            collect(&b.rhs, &labels, out);
        }
        Expr::Paren(p) => collect(&p.expr, labels, out),
        Expr::Subquery(s) => collect(&s.expr, labels, out),
        Expr::VectorSelector(selector) => out.push(Selector {
            metric: selector.name.clone().unwrap_or_default(),
            matchers: selector.matchers.matchers.clone(),
            labels: labels.clone(),
        }),
        Expr::MatrixSelector(m) => collect(&Expr::VectorSelector(m.vs.clone()), labels, out),
        Expr::Call(call) => call.args.args.iter().for_each(|arg| collect(arg, labels, out)),
        Expr::NumberLiteral(_) | Expr::StringLiteral(_) | Expr::Extension(_) => {}
    }
}

/// Returns the labels that the outermost aggregation keeps, or `None` if there is none.
fn kept_labels(expr: &Expr) -> Option<BTreeSet<String>> {
    match expr {
        Expr::Aggregate(a) => match &a.modifier {
            Some(LabelModifier::Include(_)) => Some(labels_of(a.modifier.as_ref())),
            Some(LabelModifier::Exclude(_)) => None,
            None => Some(BTreeSet::new()),
        },
        Expr::Paren(p) => kept_labels(&p.expr),
        Expr::Binary(b) => kept_labels(&b.lhs),
        Expr::Call(call) => call.args.args.iter().find_map(|arg| kept_labels(arg)),
        Expr::Unary(_)
        | Expr::Subquery(_)
        | Expr::VectorSelector(_)
        | Expr::MatrixSelector(_)
        | Expr::NumberLiteral(_)
        | Expr::StringLiteral(_)
        | Expr::Extension(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "# HELP calls_total Calls.\n# TYPE calls_total counter\n\
        calls_total{service=\"a\",kind=\"x, \\\"y\\\"\"} 3\nseconds_bucket{le=\"+Inf\",service=\"a\"} 1\nlimit 4\n\
        container_x{container=\"main\"} 2 1700000000000\n";

    fn missing(expr: &str, legend: &[&str]) -> String {
        let mut scrape = Scrape::default();
        scrape.add(PAGE);
        let legend = legend.iter().map(|l| (*l).to_owned()).collect();
        scrape.missing(&Query { place: "p".into(), expr: expr.into(), legend }).join("\n")
    }

    #[test]
    fn expressions_of_scraped_metrics_and_labels_miss_nothing() {
        for (expr, legend) in [
            (
                "sum by (kind, node) (rate(calls_total{job=\"q\",service=~\"a|b\"}[5m])) / on (node) limit",
                vec!["node"],
            ),
            ("histogram_quantile(0.9, sum by (le) (rate(seconds_bucket[5m])))", vec![]),
            ("absent(up{job=\"q\"}) or vector(0) or limit", vec![]),
            ("container_x{container!=\"main\"}", vec!["container", "node"]),
        ] {
            assert_eq!(missing(expr, &legend), "", "{expr}");
        }
    }

    #[test]
    fn metrics_labels_and_values_that_no_series_has_are_missing() {
        for (expr, legend, want) in [
            ("sum(rate(call_total[5m]))", vec![], "no metric call_total"),
            ("sum by (method) (rate(calls_total[5m]))", vec![], "no series of calls_total with {\"method\"}"),
            ("max_over_time(calls_total{service=\"b\"}[1h:5m])", vec![], "no series of calls_total"),
            ("calls_total{service=~\"b.*\"}", vec![], "no series of calls_total"),
            ("calls_total{method!=\"b\"}", vec![], "no series of calls_total"),
            ("limit * on (kind) calls_total", vec![], "no series of limit with {\"kind\"}"),
            ("limit", vec!["kind"], "no series of limit with {\"kind\"}"),
            ("sum(calls_total)", vec!["kind"], "the legend shows kind, which is aggregated"),
            ("sum by (kind", vec![], "sum by (kind"),
        ] {
            assert!(missing(expr, &legend).contains(want), "{expr}: {}", missing(expr, &legend));
        }
    }
}
