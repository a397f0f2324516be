use std::path::PathBuf;

use quintlet_agents::AgentProcess;

use super::*;
use crate::facts::{KubeletFacts, KubeletUnit};
use crate::listeners::Listener;
use crate::unit_file::UnitCommand;

const KUBELET: u32 = 812;

fn process(pid: u32) -> AgentProcess {
    AgentProcess { pid: Some(pid), command: "/usr/bin/kubelet".to_owned() }
}

fn settings() -> NodeSettings {
    NodeSettings {
        root_dir: "/var/lib/kubelet".into(),
        node_name: "n1".to_owned(),
        run_dir: "/run/quintlet".into(),
        runtime_endpoint: "unix:///run/containerd/containerd.sock".to_owned(),
        cgroup_driver: Some("systemd".to_owned()),
        runtime_cgroup_driver: Some("systemd".to_owned()),
        runtime_error: None,
        ports: [("port".to_owned(), 10250), ("healthzPort".to_owned(), 10248)].into(),
    }
}

/// Returns a node of kubeadm whose kubelet runs.
fn node() -> MachineFacts {
    let listener = |port| Listener { port, pid: Some(KUBELET), command: "/usr/bin/kubelet".to_owned() };
    let kubelet = KubeletFacts { process: process(KUBELET), uses_root: true, settings: Ok(settings()) };
    MachineFacts {
        unit: KubeletUnit {
            load_state: "loaded".to_owned(),
            is_active: true,
            is_enabled: true,
            main_pid: Some(KUBELET),
            drop_ins: vec!["/usr/lib/systemd/system/kubelet.service.d/10-kubeadm.conf".into()],
            command: UnitCommand::default(),
            runs_quintlet: false,
        },
        active_units: Vec::new(),
        kubelets: vec![kubelet],
        quintlet: None,
        listeners: vec![listener(10250), listener(10248)],
        node: Ok(settings()),
        existing: Vec::new(),
        missing_directories: Vec::new(),
    }
}

/// Returns the same machine with a node beside that kubelet.
fn neighbour() -> MachineFacts {
    let mut facts = node();
    let own = NodeSettings {
        root_dir: "/var/lib/quintlet-beside/root".into(),
        node_name: "n1-quintlet".to_owned(),
        runtime_endpoint: "unix:///run/other.sock".to_owned(),
        ports: [("port".to_owned(), 10350), ("healthzPort".to_owned(), 10348)].into(),
        ..settings()
    };
    facts.node = Ok(own);
    facts.kubelets[0].uses_root = false;
    facts
}

type Change = fn(&mut MachineFacts);

fn check(
    base: fn() -> MachineFacts,
    decide: fn(&MachineFacts) -> Vec<Refusal>,
    cases: &[(Change, u8, &str)],
) {
    assert_eq!(decide(&base()), [], "a machine that is fit");
    for (change, code, text) in cases {
        let mut facts = base();
        change(&mut facts);
        let refusals = decide(&facts);
        assert_eq!(refusals.len(), 1, "{text}: {refusals:?}");
        assert_eq!(refusals[0], Refusal { text: (*text).to_owned(), code: *code });
    }
}

#[test]
fn the_place_of_a_kubelet_is_not_taken_where_something_would_break() {
    check(
        node,
        replace,
        &[
            (
                |facts| facts.unit.load_state = "not-found".to_owned(),
                69,
                "there is no kubelet.service whose place Quintlet could take: without a kubelet, install the package quintlet-kubelet, or \
             use quintlet.target",
            ),
            (
                |facts| facts.unit.load_state = "masked".to_owned(),
                1,
                "kubelet.service is masked: run systemctl unmask kubelet, or use quintlet.target",
            ),
            (|facts| facts.unit.runs_quintlet = true, 1, "kubelet.service runs Quintlet already"),
            (
                |facts| facts.unit.drop_ins.push("/etc/systemd/system/kubelet.service.d/zzz.conf".into()),
                64,
                "/etc/systemd/system/kubelet.service.d/zzz.conf would precede the drop-in of Quintlet: give it a name before \
             /etc/systemd/system/kubelet.service.d/zz-quintlet.conf",
            ),
            (
                |facts| facts.quintlet = Some(process(9)),
                69,
                "another Quintlet uses the same root directory, pid 9 (/usr/bin/kubelet): stop it",
            ),
            (
                |facts| {
                    facts.active_units =
                        vec!["quintlet.target".to_owned(), "quintlet-pod-sync.service".to_owned()]
                },
                69,
                "Quintlet runs already, as quintlet.target quintlet-pod-sync.service: run systemctl disable --now quintlet.target \
             quintlet-pod-sync.service",
            ),
            (
                |facts| {
                    facts.listeners[0] = Listener { port: 10250, pid: Some(7), command: "nginx".to_owned() }
                },
                69,
                "port 10250 (port) is in use by pid 7 (nginx): change it in the configuration of the kubelet, or stop the process",
            ),
            (
                |facts| facts.listeners[1].pid = None,
                69,
                "port 10248 (healthzPort) is in use by another process: change it in the configuration of the kubelet, or stop the process",
            ),
            (
                |facts| facts.node.as_mut().unwrap().cgroup_driver = Some("cgroupfs".to_owned()),
                64,
                "cgroupDriver is cgroupfs, and the runtime at unix:///run/containerd/containerd.sock uses systemd: change the field, or the \
             runtime",
            ),
            (
                |facts| facts.node.as_mut().unwrap().runtime_error = Some("no such file".to_owned()),
                69,
                "the runtime at unix:///run/containerd/containerd.sock does not answer: no such file: start it",
            ),
            (
                |facts| {
                    let lines =
                        vec!["/etc/kubernetes/kubelet.conf does not exist: run kubeadm join".to_owned()];
                    facts.node = Err(CheckFailure { code: 69, lines });
                },
                69,
                "/etc/kubernetes/kubelet.conf does not exist: run kubeadm join",
            ),
            (
                |facts| facts.existing = vec![DROP_IN.into()],
                64,
                "/etc/systemd/system/kubelet.service.d/zz-quintlet.conf exists and would be overwritten: remove it, or rename it",
            ),
        ],
    );
}

#[test]
fn a_kubelet_that_systemd_does_not_run_is_in_the_way_with_its_ports() {
    let mut facts = node();
    facts.unit.main_pid = None;
    let texts: Vec<String> = replace(&facts).into_iter().map(|refusal| refusal.text).collect();
    assert_eq!(texts.len(), 3, "{texts:?}");
    assert_eq!(
        texts[0],
        "a kubelet that is not kubelet.service uses the same root directory, pid 812 (/usr/bin/kubelet): stop it"
    );
    facts.kubelets[0].uses_root = false;
    facts.listeners.clear();
    assert_eq!(replace(&facts), [], "the kubelet of another root directory is no obstacle");
}

#[test]
fn a_node_beside_a_kubelet_shares_nothing_with_it() {
    check(
        neighbour,
        beside,
        &[
            (
                |facts| facts.node.as_mut().unwrap().runtime_endpoint = settings().runtime_endpoint,
                64,
                "the kubelet, pid 812 (/usr/bin/kubelet), uses the runtime unix:///run/containerd/containerd.sock, too, and stops pods in \
                 it that are not its own: give --runtime-endpoint of another one",
            ),
            (
                |facts| facts.node.as_mut().unwrap().node_name = "N1".to_owned(),
                64,
                "the kubelet, pid 812 (/usr/bin/kubelet), has the node name N1, too: give another --node-name",
            ),
            (
                |facts| facts.kubelets[0].uses_root = true,
                69,
                "/var/lib/quintlet-beside/root is the root directory of a kubelet, pid 812 (/usr/bin/kubelet)",
            ),
            (
                |facts| facts.listeners[0].port = 10350,
                69,
                "port 10350 (port) is in use by pid 812 (/usr/bin/kubelet): choose another one with --port or --healthz-port",
            ),
            (
                |facts| {
                    let lines = vec!["--x: unknown".to_owned(), "help".to_owned()];
                    facts.kubelets[0].settings = Err(CheckFailure { code: 64, lines });
                },
                64,
                "the runtime and the node name of the kubelet, pid 812 (/usr/bin/kubelet), are unknown: --x: unknown",
            ),
            (
                |facts| facts.node.as_mut().unwrap().runtime_cgroup_driver = Some("cgroupfs".to_owned()),
                64,
                "cgroupDriver is systemd, and the runtime at unix:///run/other.sock uses cgroupfs: change the field, or the runtime",
            ),
        ],
    );
    let mut alone = neighbour();
    alone.kubelets.clear();
    assert_eq!(beside(&alone), [], "there need not be a kubelet");
}

#[test]
fn without_root_systemd_or_programs_nothing_is_surveyed() {
    let fit = BasicFacts { is_root: true, has_systemd: true, missing_programs: Vec::new(), journal: None };
    assert_eq!(before_survey(&fit), []);
    let unfit = BasicFacts {
        is_root: false,
        has_systemd: false,
        missing_programs: vec![PathBuf::from("/usr/bin/pod-sync")],
        journal: Some(PathBuf::from("/var/lib/quintlet/install.json")),
    };
    let refusals = before_survey(&unfit);
    let texts: Vec<&str> = refusals.iter().map(|refusal| refusal.text.as_str()).collect();
    assert_eq!(
        texts,
        [
            "only root can install and uninstall: run it with sudo",
            "systemd does not run on this machine: run quintctl up, or kubelet of Quintlet, under its own supervisor",
            "quintctl install has run here (/var/lib/quintlet/install.json exists): run quintctl uninstall first",
            "/usr/bin/pod-sync does not exist: install the package quintlet, or set --bin-dir",
        ]
    );
    assert_eq!(before_removal(&unfit).len(), 2, "a journal and missing programs do not prevent the removal");
}
