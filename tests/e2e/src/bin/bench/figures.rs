//! Medians and ratios of the rounds.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use quintlet_e2e::cost::{Agent, Cost};
use quintlet_e2e::work::{self, Burst};

/// Values of a figure by what was measured: an agent, or the runtime alone.
type Values = BTreeMap<String, Vec<f64>>;

#[derive(Default)]
pub(crate) struct Figures {
    half: Values,
    create: Values,
    delete: Values,
    // By agent.
    starts: BTreeMap<String, Values>,
    lives: BTreeMap<String, Values>,
}

impl Figures {
    /// Adds the seconds of a round.
    pub(crate) fn add(&mut self, who: &str, created: Burst, deleted: f64) {
        self.half.entry(who.to_owned()).or_default().push(created.half_ready);
        self.create.entry(who.to_owned()).or_default().push(created.ready);
        self.delete.entry(who.to_owned()).or_default().push(deleted);
    }

    /// Measures a round of an agent.
    pub(crate) async fn add_life(&mut self, who: &str, agent: &Agent<'_>, pods: usize) -> anyhow::Result<()> {
        let before = Cost::of(agent).await?;
        let created = work::burst(agent.api, pods).await;
        self.add_start(who, &Cost::of(agent).await?.since(&before), pods);
        let deleted = work::remove(agent.api, pods).await;
        self.add(who, created, deleted);
        self.add_cost(who, &Cost::of(agent).await?.since(&before), pods);
        Ok(())
    }

    /// Adds what the starts of `pods` pods cost.
    pub(crate) fn add_start(&mut self, who: &str, cost: &Cost, pods: usize) {
        add_cost(&mut self.starts, who, cost, pods);
    }

    /// Adds what the lives of `pods` pods cost, which include their starts.
    pub(crate) fn add_cost(&mut self, who: &str, cost: &Cost, pods: usize) {
        add_cost(&mut self.lives, who, cost, pods);
    }

    pub(crate) fn report(&self) -> Map<String, Value> {
        let mut report = Map::new();
        let seconds = [
            ("create_to_half_ready", &self.half),
            ("create_to_ready", &self.create),
            ("delete_to_gone", &self.delete),
        ];
        for (name, values) in seconds {
            report.insert(
                name.to_owned(),
                json!({"seconds": medians(values), "lowest_and_highest": extremes(values), "ratios": ratios(values)}),
            );
        }
        for (name, costs) in [("per_pod_start", &self.starts), ("per_pod_life", &self.lives)] {
            let costs: BTreeMap<&str, _> =
                costs.iter().map(|(who, values)| (who.as_str(), medians(values))).collect();
            report.insert(name.to_owned(), json!(costs));
        }
        let cpu = |who: &str| Some(quantile(self.lives.get(who)?.get("cpu_ms all")?, 0.5));
        if let (Some(ours), Some(kubelets)) = (cpu("quintlet"), cpu("kubelet")) {
            report.insert("cpu_per_pod_life_to_kubelet".to_owned(), json!(ours / kubelets));
        }
        report
    }
}

fn add_cost(costs: &mut BTreeMap<String, Values>, who: &str, cost: &Cost, pods: usize) {
    let costs = costs.entry(who.to_owned()).or_default();
    for (figure, per_pod) in cost.per_pod(pods) {
        costs.entry(figure).or_default().push(per_pod);
    }
}

/// Returns the ratios of Quintlet's median to the kubelet's and to the best of the runtime alone.
fn ratios(values: &Values) -> Value {
    let medians = medians(values);
    let Some(ours) = medians.get("quintlet") else { return Value::Null };
    let raw = medians.iter().filter(|(key, _)| key.starts_with("raw")).map(|(_, value)| *value);
    let best = raw.fold(f64::INFINITY, f64::min);
    json!({"raw": ours / best, "kubelet": medians.get("kubelet").map(|kubelets| ours / kubelets)})
}

fn extremes(values: &Values) -> BTreeMap<&str, [f64; 2]> {
    values.iter().map(|(key, all)| (key.as_str(), [quantile(all, 0.0), quantile(all, 1.0)])).collect()
}

pub(crate) fn medians(all: &Values) -> BTreeMap<&str, f64> {
    all.iter().map(|(key, values)| (key.as_str(), quantile(values, 0.5))).collect()
}

/// Returns a quantile, interpolated between the two nearest values.
pub(crate) fn quantile(values: &[f64], q: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let at = sorted.len().saturating_sub(1) as f64 * q;
    let value = |index: f64| sorted.get(index as usize).copied().unwrap_or_default();
    let (below, above) = (value(at.floor()), value(at.ceil()));
    below + (above - below) * at.fract()
}
