//! Tests the alerts of the chart with promtool, and their runbooks.

use std::collections::BTreeSet;
use std::process::Command;

use quintlet_e2e::bins;
use quintlet_e2e::monitoring::{alerts, dashboard, repository, yaml};
use serde_json::Value;

fn names() -> BTreeSet<String> {
    let all: Vec<String> = alerts().iter().map(|rule| rule["alert"].as_str().unwrap().to_owned()).collect();
    let names: BTreeSet<String> = all.iter().cloned().collect();
    assert!(names.len() > 20 && names.len() == all.len(), "each name once: {all:?}");
    names
}

fn promtool(args: &[&str]) {
    let out = Command::new(bins::promtool()).args(args).current_dir(repository()).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(out.status.success(), "promtool {args:?}: {}{}", text(&out.stdout), text(&out.stderr));
}

/// Returns minutes of a time such as `15m`.
fn minutes(time: &Value) -> u64 {
    time.as_str()
        .and_then(|t| t.strip_suffix('m')?.parse().ok())
        .unwrap_or_else(|| panic!("not in minutes: {time}"))
}

#[test]
fn each_alert_fires_and_clears_again() {
    let file = "tests/alerts/alerts_test.yaml";
    promtool(&["check", "rules", "charts/quintlet/files/alerts.yaml"]);
    promtool(&["test", "rules", file]);
    let tests = yaml(&repository().join(file));
    let steps: Vec<&Value> = tests["tests"]
        .as_array()
        .unwrap()
        .iter()
        .flat_map(|test| test["alert_rule_test"].as_array().unwrap())
        .collect();
    for name in names() {
        let tests = steps.iter().filter(|step| step["alertname"] == name.as_str());
        let states: Vec<(u64, usize)> = tests
            .map(|step| (minutes(&step["eval_time"]), step["exp_alerts"].as_array().unwrap().len()))
            .collect();
        let [(fires, count), (clears, 0)] = states[..] else { panic!("{name}: {states:?}") };
        assert!(count > 0 && fires < clears, "{name} fires first and clears later: {states:?}");
    }
}

#[test]
fn each_alert_has_a_runbook_and_each_runbook_an_alert() {
    let page = std::fs::read_to_string(repository().join("docs/alerts.md")).unwrap();
    let sections: BTreeSet<String> =
        page.lines().filter_map(|line| line.strip_prefix("### ")).map(str::to_owned).collect();
    assert_eq!(sections, names());
    for section in page.split("\n### ").skip(1) {
        for part in ["**Impact:** ", "**Look at:**\n", "**Act:** "] {
            assert!(section.contains(part), "{part} is missing in {section}");
        }
    }
    for rule in alerts() {
        let name = rule["alert"].as_str().unwrap();
        assert_eq!(
            rule["annotations"]["runbook_url"],
            format!("docs/alerts.md#{}", name.to_lowercase()),
            "{name}"
        );
        let severity = rule["labels"]["severity"].as_str().unwrap();
        let section = page.split("\n### ").find(|section| section.lines().next() == Some(name)).unwrap();
        assert!(
            section.to_lowercase().contains(&format!("\n\n{severity}. ")),
            "{name} is {severity}: {section}"
        );
    }
}

#[test]
fn panels_of_the_dashboard_have_queries_and_do_not_overlap() {
    let dashboard = dashboard();
    let panels = dashboard["panels"].as_array().unwrap();
    let mut ids = BTreeSet::new();
    let mut cells = BTreeSet::new();
    for panel in panels {
        let title = panel["title"].as_str().unwrap();
        assert!(ids.insert(panel["id"].as_u64().unwrap()), "{title} has the ID of another panel");
        let [x, y, w, h] = ["x", "y", "w", "h"].map(|key| panel["gridPos"][key].as_u64().unwrap());
        assert!(x + w <= 24, "{title} is too wide");
        for cell in (x..x + w).flat_map(|x| (y..y + h).map(move |y| (x, y))) {
            assert!(cells.insert(cell), "{title} overlaps another panel");
        }
        let queries = panel["targets"].as_array().map_or(0, Vec::len);
        assert_eq!(queries == 0, panel["type"] == "row", "{title}");
        let refs: BTreeSet<_> =
            panel["targets"].as_array().into_iter().flatten().map(|t| t["refId"].to_string()).collect();
        assert_eq!(refs.len(), queries, "{title}: each query has its own letter");
    }
    assert!(panels.len() > 40, "{}", panels.len());
}
