//! Registration of the driver's process over its real sockets.

use std::time::Duration;

use pod_sync_plugins::PluginState;
use quintlet_csi_driver::fault::{self, Fault};

use crate::common::{DRIVER, Machine, eventually};

fn is_failed(state: Option<&PluginState>) -> bool {
    matches!(state, Some(PluginState::Failed { .. }))
}

fn failure(state: Option<PluginState>) -> String {
    match state {
        Some(PluginState::Failed { error }) => error,
        other => panic!("{other:?}"),
    }
}

fn results(machine: &Machine) -> Vec<String> {
    let text = std::fs::read_to_string(machine.state.join("registrations.log")).unwrap_or_default();
    text.lines().map(str::to_owned).collect()
}

#[tokio::test]
async fn a_driver_is_registered_with_its_node_information_and_deregistered_with_its_socket() {
    let machine = Machine::new();
    let agent = machine.agent();
    let topology = "--topology=topology.test/zone=z1,topology.test/host=h1";
    let _driver = machine.driver(&["--max-volumes=7", topology, "--versions=1.0.0,1.7.0"]);
    agent.registered().await;
    let node = agent.drivers.csi_node();
    let entry = node.borrow().drivers[DRIVER].clone();
    assert_eq!(entry.node_id, "node-1");
    assert_eq!(entry.allocatable, Some(7));
    assert_eq!(entry.topology_keys(), ["topology.test/host", "topology.test/zone"]);
    let driver = agent.drivers.get(DRIVER).unwrap();
    assert_eq!(driver.version.to_string(), "1.7.0");
    let deadline = pod_sync_plugins::call::Deadline::after(Duration::from_secs(5));
    assert!(driver.client.probe(deadline).await.unwrap());
    eventually("the driver learns of its registration", || results(&machine) == ["registered"]).await;

    std::fs::remove_file(machine.root.join("plugins_registry/reg.sock")).unwrap();
    agent.state_of("reg.sock", |state| state.is_none()).await;
    eventually("the driver is deregistered", || agent.drivers.get(DRIVER).is_err()).await;
    assert!(node.borrow().drivers.is_empty());
}

#[tokio::test]
async fn a_driver_that_crashes_and_restarts_is_registered_again() {
    let machine = Machine::new();
    let agent = machine.agent();
    let mut driver = machine.driver(&["--node-id=before"]);
    agent.registered().await;
    driver.kill();
    let _driver = machine.driver(&["--node-id=after"]);
    let node = agent.drivers.csi_node();
    eventually("the new node ID is known", || {
        node.borrow().drivers.get(DRIVER).is_some_and(|driver| driver.node_id == "after")
    })
    .await;
}

#[tokio::test]
async fn a_driver_that_started_before_the_agent_is_registered_after_each_start_of_the_agent() {
    let machine = Machine::new();
    let _driver = machine.driver(&[]);
    eventually("the driver listens", || machine.root.join("plugins_registry/reg.sock").exists()).await;
    for _ in 0..2 {
        let agent = machine.agent();
        agent.registered().await;
        agent.crash();
    }
}

#[tokio::test]
async fn a_driver_without_a_usable_version_or_type_is_refused_with_the_reason() {
    for (arguments, expected) in [
        (
            &["--versions=2.0.0"][..],
            "RegisterPlugin error -- plugin validation failed with err: validation failed for CSI Driver",
        ),
        (
            &["--kind=Toaster"],
            "RegisterPlugin error -- no handler registered for plugin type: Toaster at socket",
        ),
        (
            &["--node-id="],
            "RegisterPlugin error -- plugin registration failed with err: \
             error adding CSI driver node info: driverNodeID must not be empty",
        ),
    ] {
        let machine = Machine::new();
        let agent = machine.agent();
        let _driver = machine.driver(arguments);
        let error = failure(agent.state_of("reg.sock", is_failed).await);
        assert!(error.starts_with(expected), "{error}");
        eventually("the driver learns the reason", || {
            results(&machine).first() == Some(&format!("refused: {error}"))
        })
        .await;
        assert!(agent.drivers.get(DRIVER).is_err());
    }
}

#[tokio::test]
async fn a_driver_that_hangs_in_any_call_of_its_registration_blocks_no_other_one() {
    for call in ["GetInfo", "NotifyRegistrationStatus"] {
        let machine = Machine::new();
        fault::set(&machine.state, &[(call, Fault::Hang)]).unwrap();
        let agent = machine.agent();
        let _hanging = machine.driver(&["--name=hanging.csi", "--registration=hanging.sock"]);
        let other = machine.beside();
        let _driver = other.driver(&[]);
        agent.registered().await;
        let error = failure(agent.state_of("hanging.sock", is_failed).await);
        assert!(
            error.ends_with("rpc error: code = DeadlineExceeded desc = context deadline exceeded"),
            "{error}"
        );
        assert!(agent.drivers.get("hanging.csi").is_err());
        // The fault ends.
        fault::set(&machine.state, &[]).unwrap();
        agent.state_of("hanging.sock", |state| matches!(state, Some(PluginState::Registered(_)))).await;
    }
}

#[tokio::test]
async fn a_driver_that_crashes_during_its_registration_fails_and_is_registered_after_its_restart() {
    let machine = Machine::new();
    fault::set(&machine.state, &[("NodeGetInfo", Fault::DieBefore)]).unwrap();
    let agent = machine.agent();
    let mut driver = machine.driver(&[]);
    let error = failure(agent.state_of("reg.sock", is_failed).await);
    assert!(error.contains("rpc error: code = Unavailable"), "{error}");
    eventually("the driver has ended", || driver.has_ended()).await;
    fault::set(&machine.state, &[]).unwrap();
    let _driver = machine.driver(&[]);
    agent.registered().await;
}

#[tokio::test]
async fn two_drivers_of_one_name_are_ordered_by_version() {
    let machine = Machine::new();
    let second = machine.beside();
    let agent = machine.agent();
    let _first = machine.driver(&["--versions=1.2.0", "--node-id=first"]);
    agent.registered().await;
    let same = ["--registration=second.sock", "--versions=1.2.0", "--endpoint"];
    let endpoint = machine.root.join("plugins/second.sock");
    let endpoint = endpoint.to_str().unwrap();
    let refused = second.driver(&[&same[..], &[endpoint]].concat());
    let error = failure(agent.state_of("second.sock", is_failed).await);
    assert!(error.ends_with("already registered with a higher supported version: \"1.2.0\""), "{error}");
    assert_eq!(agent.drivers.get(DRIVER).unwrap().node.node_id, "first");
    drop(refused);
    let newer =
        ["--registration=second.sock", "--versions=1.3.0", "--node-id=second", "--endpoint", endpoint];
    let _newer = second.driver(&newer);
    agent.state_of("second.sock", |state| matches!(state, Some(PluginState::Registered(_)))).await;
    assert_eq!(agent.drivers.get(DRIVER).unwrap().node.node_id, "second");
    std::fs::remove_file(machine.root.join("plugins_registry/second.sock")).unwrap();
    eventually("the first driver is used again", || {
        agent.drivers.get(DRIVER).is_ok_and(|driver| driver.node.node_id == "first")
    })
    .await;
}

#[tokio::test]
async fn a_link_to_a_drivers_socket_is_refused_and_the_socket_itself_is_not() {
    let machine = Machine::new();
    let agent = machine.agent();
    let _driver = machine.driver(&[]);
    agent.registered().await;
    let registry = machine.root.join("plugins_registry");
    std::os::unix::fs::symlink(registry.join("reg.sock"), registry.join("link.sock")).unwrap();
    std::fs::write(registry.join("notes.txt"), "").unwrap();
    let state = agent.state_of("link.sock", |state| state.is_some()).await;
    let Some(PluginState::Refused(refusal)) = state else { panic!("{state:?}") };
    assert!(refusal.to_string().contains("is a symbolic link"), "{refusal}");
    let state = agent.state_of("notes.txt", |state| state.is_some()).await;
    assert!(
        matches!(&state, Some(PluginState::Refused(r)) if r.to_string().ends_with("is not a socket")),
        "{state:?}"
    );
    agent.registered().await;
}
