//! The services of `docker/compose.yaml` on a Docker Engine of their own: tests/compose.sh.

use std::process::Command;

use quintlet_e2e::bins;
use quintlet_e2e::monitoring::repository;

#[test]
fn the_services_of_the_compose_file_survive_kills_and_leave_nothing() {
    let mut script = Command::new(repository().join("tests/compose.sh"));
    script.env("BIN_DIR", bins::dir()).env("OTLP_RECEIVER", env!("CARGO_BIN_EXE_otlp-receiver"));
    let out = script.output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(out.status.success(), "{}{}", text(&out.stdout), text(&out.stderr));
}
