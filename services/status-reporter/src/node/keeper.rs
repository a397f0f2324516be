//! Registers the node and keeps its status.

use std::time::Duration;

use quintlet_kit::clock::Clock;
use quintlet_kit::server::{HealthHandle, NODE};
use serde_json::{Value, json};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::FactBoard;
use super::health::HealthBoard;
use super::setters::{self, Due, View, Weight};
use super::startup::Startup;
use crate::api::{ApiClient, ApiFailure, node_path};
use crate::events::recorder::Recorder;
use crate::status::normalize::seconds;

/// How often readiness is judged without news: peers and facts grow old by themselves.
const JUDGE_EVERY: Duration = Duration::from_secs(2);
/// How long a registration waits for facts, so that the node usually starts complete.
const FACTS_WITHIN: Duration = Duration::from_secs(1);

const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// The one writer of the Node object.
pub struct NodeKeeper {
    /// Calls for this task alone.
    pub api: ApiClient,
    /// Name of the node.
    pub name: String,
    /// Create the node if it is not there.
    pub register: bool,
    /// Taints of a node that is made here, as v1 Taints.
    pub taints: Vec<Value>,
    /// Labels of a node that is made here.
    pub labels: Vec<(String, String)>,
    /// Provider id of a node that is made here; may be empty.
    pub provider_id: String,
    /// Shortest time between two writes that are not urgent, and longest without a look at what the API server has.
    pub update_every: Duration,
    /// How often an unchanged node is written.
    pub report_every: Duration,
    /// Wall and boot time.
    pub clock: Clock,
    /// What the services say.
    pub facts: FactBoard,
    /// Whether they serve.
    pub health: HealthBoard,
    /// Where events go.
    pub events: Recorder,
    /// How long the start takes.
    pub startup: Startup,
    /// Where it is told whether the API server gives and takes the Node.
    pub reached: HealthHandle,
}

impl NodeKeeper {
    /// Runs until `stop`.
    pub async fn run(self, stop: CancellationToken) {
        // A write cut short is repeated by the next process.
        tokio::select! {
            () = self.keep() => {}
            () = stop.cancelled() => {}
        }
    }

    async fn keep(&self) {
        let started = self.clock.boot();
        let (mut live, made) = self.appear(started).await;
        let mut last_read = Instant::now();
        let mut last_update = made.then(Instant::now);
        let mut last_report = last_update;
        let mut report_every = self.spread();
        let mut failures = 0_u32;
        loop {
            // Others write the Node too: its controller calls it Unknown, people cordon and label it.
            let is_old = last_read.elapsed() >= self.update_every;
            let fresh = !is_old || self.read_again(&mut live, &mut failures).await;
            if is_old && fresh {
                last_read = Instant::now();
            }
            let (desired, events) = self.desired(&live, started);
            let weight = setters::weigh(&live, &desired);
            let since = |at: Option<Instant>| at.map(|at| at.elapsed());
            let has_facts = !self.facts.is_empty();
            let due = setters::due(
                weight,
                has_facts,
                since(last_update),
                since(last_report),
                self.update_every,
                report_every,
            );
            if due != Due::Nothing {
                match self.write(&live, &desired, due == Due::Report).await {
                    Ok(written) => {
                        self.reached.set_serving(NODE).await;
                        failures = 0;
                        last_update = Some(Instant::now());
                        // A periodic report keeps the pace, a change starts a new one.
                        let periodic = due == Due::Report && weight == Weight::Nothing;
                        report_every = if periodic { self.report_every } else { self.spread() };
                        last_report = last_update;
                        self.tell(&live, &written, events);
                        live = written;
                        last_read = Instant::now();
                    }
                    Err(failure) => {
                        failures = failures.saturating_add(1);
                        if failures == 1 {
                            warn!(%failure, "the node's status cannot be written");
                            self.reached.set_not_serving(NODE).await;
                        }
                        if let Ok(read) = self.api.get(&node_path(&self.name)).await {
                            self.tell(&live, &read, Vec::new());
                            live = read;
                            last_read = Instant::now();
                        }
                        let after = failure.retry_after().unwrap_or_else(|| pause(failures));
                        tokio::time::sleep(after).await;
                        continue;
                    }
                }
            }
            let look =
                if fresh { JUDGE_EVERY.min(self.update_every).min(self.report_every) } else { LONGEST_PAUSE };
            // Both arms only lead to another look.
            tokio::select! {
                () = self.facts.changed() => {}
                () = tokio::time::sleep(look) => {}
            }
        }
    }

    /// Puts what the API server has now in place of what it had; without an answer that stays. Whether there was one.
    async fn read_again(&self, live: &mut Value, failures: &mut u32) -> bool {
        match self.api.get(&node_path(&self.name)).await {
            Ok(read) => {
                self.reached.set_serving(NODE).await;
                *failures = 0;
                self.tell(live, &read, Vec::new());
                *live = read;
                true
            }
            Err(failure) => {
                *failures = failures.saturating_add(1);
                if *failures == 1 {
                    warn!(%failure, "the node cannot be read");
                    self.reached.set_not_serving(NODE).await;
                }
                false
            }
        }
    }

    fn desired(&self, live: &Value, started: Duration) -> (Value, Vec<crate::events::Occurrence>) {
        let (facts, peers) = (self.facts.snapshot(), self.health.peers());
        let readiness =
            setters::readiness(View { facts: &facts, peers: &peers, boot: self.clock.boot(), started });
        setters::desired(live, &facts, &readiness, &seconds(self.clock.wall()))
    }

    async fn write(&self, live: &Value, desired: &Value, heartbeat: bool) -> Result<Value, ApiFailure> {
        let Some(patch) = setters::patch(live, desired, heartbeat) else { return Ok(live.clone()) };
        debug!(patch = %patch, "node status");
        self.api.patch(&format!("{}/status", node_path(&self.name)), &patch).await
    }

    fn tell(&self, before: &Value, after: &Value, events: Vec<crate::events::Occurrence>) {
        if is_ready(after) {
            self.startup.ready(self.clock.boot());
        }
        for event in events.into_iter().chain(setters::schedulable_event(Some(before), after)) {
            // A full queue is counted there.
            self.events.record(event);
        }
    }

    /// The node as it is in the API server, made if need be; true if it was made now.
    async fn appear(&self, started: Duration) -> (Value, bool) {
        let mut initial = setters::initial(&self.name, setters::go_arch(std::env::consts::ARCH));
        for (key, value) in &self.labels {
            initial["metadata"]["labels"][key] = json!(value);
        }
        if !self.taints.is_empty() {
            initial["spec"]["taints"] = json!(self.taints);
        }
        if !self.provider_id.is_empty() {
            initial["spec"]["providerID"] = json!(self.provider_id);
        }
        if self.register && self.facts.is_empty() {
            // Without facts by then the node is made without them.
            let _no_facts = tokio::time::timeout(FACTS_WITHIN, self.facts.changed()).await;
        }
        let mut failures = 0_u32;
        loop {
            let attempt = if self.register {
                self.register(&initial, started).await
            } else {
                self.api.get(&node_path(&self.name)).await.map(|node| (node, false))
            };
            match attempt {
                Ok(found) => {
                    self.reached.set_serving(NODE).await;
                    return found;
                }
                Err(failure) => {
                    failures = failures.saturating_add(1);
                    if failures == 1 {
                        warn!(%failure, node = %self.name, "the node cannot be registered yet");
                        self.reached.set_not_serving(NODE).await;
                    }
                    tokio::time::sleep(failure.retry_after().unwrap_or_else(|| pause(failures))).await;
                }
            }
        }
    }

    /// The report period, up to half of it earlier or later, so that nodes do not report together.
    fn spread(&self) -> Duration {
        self.report_every.mul_f64(0.5 + rand::random::<f64>())
    }

    async fn register(&self, initial: &Value, started: Duration) -> Result<(Value, bool), ApiFailure> {
        let (node, events) = self.desired(initial, started);
        self.startup.attempt(self.clock.boot());
        match self.api.create("/api/v1/nodes", &node).await {
            Ok(made) => {
                info!(node = %self.name, "node registered");
                self.startup.registered(self.clock.boot());
                self.tell(&json!({}), &made, events);
                Ok((made, true))
            }
            Err(ApiFailure::AlreadyExists(_) | ApiFailure::Denied(_)) => {
                let live = self.api.get(&node_path(&self.name)).await?;
                let adopted = setters::adopt(&live, initial);
                info!(node = %self.name, "node found");
                let node = match setters::patch(&live, &adopted, false) {
                    Some(patch) => {
                        self.api.patch(&format!("{}/status", node_path(&self.name)), &patch).await?
                    }
                    None => live,
                };
                Ok((node, false))
            }
            Err(failure) => Err(failure),
        }
    }
}

fn is_ready(node: &Value) -> bool {
    let conditions = node["status"]["conditions"].as_array();
    conditions.into_iter().flatten().any(|c| c["type"] == "Ready" && c["status"] == "True")
}

fn pause(failures: u32) -> Duration {
    FIRST_PAUSE.saturating_mul(2_u32.saturating_pow(failures.saturating_sub(1).min(10))).min(LONGEST_PAUSE)
}
