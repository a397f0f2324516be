//! Compares our histories of pods with those of a kubelet, field by field, except for the entries of
//! [`history_differences`].

use std::collections::BTreeSet;

use futures::StreamExt as _;
use futures::stream::FuturesUnordered;
use quintlet_recordings::cluster::Cluster;
use quintlet_recordings::compare::differences;
use quintlet_recordings::history::observe::Observer;
use quintlet_recordings::history::run::RecordedNode;
use quintlet_recordings::history::scenario::{self, Scenario};
use quintlet_recordings::runtime;
use quintlet_simulation::{Options, Sim};

use crate::history_differences::{KNOWN, matches};

#[test]
fn every_scenario_was_recorded() {
    let scenarios = scenario::scenarios(std::path::Path::new("/")).unwrap();
    let scenarios: BTreeSet<String> = scenarios.into_iter().map(|s| s.name).collect();
    let histories: BTreeSet<String> = scenario::histories().unwrap().into_keys().collect();
    assert_eq!(scenarios, histories, "see README.md how to record");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn histories_of_volumes_equal_those_of_a_kubelet() {
    let sim = Sim::prepare(Options { runtime: runtime::options(), ..Options::default() }).await;
    runtime::prepare(&sim.runtime);
    sim.start_all();
    let cluster = Cluster::new(sim.api.client());
    let root = sim.root_dir();
    let hosts = root.with_file_name("hosts");
    let node = RecordedNode {
        observer: Observer::start(&cluster).await.unwrap(),
        cluster,
        names: vec![(root.display().to_string(), "<root>".to_owned())],
        drivers: root.with_file_name("drivers"),
        hosts: hosts.clone(),
        registrar: None,
        attached: Some(tokio::sync::Mutex::default()),
        root,
    };
    let scenarios = scenario::scenarios(&hosts).unwrap();
    let histories = scenario::histories().unwrap();
    let run = async |scenario: &Scenario| {
        let events = histories[&scenario.name].facts["events"].as_array().unwrap().len();
        (scenario.name.clone(), node.run(scenario, events).await)
    };
    let mut runs: FuturesUnordered<_> = scenarios.iter().map(run).collect();
    let (mut wrong, mut used) = (Vec::new(), BTreeSet::new());
    while let Some((name, ours)) = runs.next().await {
        let ours = ours.unwrap_or_else(|error| panic!("{error:#}"));
        let kubelet = &histories[&name].facts;
        for difference in differences(kubelet, &ours) {
            match KNOWN.iter().position(|known| matches(known, &name, &difference)) {
                Some(place) => {
                    used.insert(place);
                }
                None => wrong.push(format!("{name}: {difference}")),
            }
        }
    }
    drop(runs);
    sim.finish_beside_clients().await;
    assert!(wrong.is_empty(), "{} differences:\n{}", wrong.len(), wrong.join("\n"));
    let unused: Vec<_> =
        KNOWN.iter().enumerate().filter(|(n, _)| !used.contains(n)).map(|(_, k)| k.path).collect();
    assert_eq!(unused, [""; 0], "no such difference any more");
}
