//! `quintctl upgrade`: the steps of an upgrade, and why it may not begin.

use std::io::Write;
use std::path::{Path, PathBuf};

use crate::args::UpgradeArgs;
use crate::error::InstallError;
use crate::execute::{self, Execution};
use crate::journal::Journal;
use crate::machine::{Machine, UPGRADE_JOURNAL};
use crate::output::print;
use crate::plan::InstallPlan;
use crate::refusal::Refusal;
use crate::steps::InstallStep;
use crate::swap::ServiceSwap;
use crate::upgrade_facts::{self, UpgradeFacts};

/// Exit codes: an option has to be changed, another reason.
const USAGE: u8 = 64;
const FAILURE: u8 = 1;

/// Shows the steps of an upgrade and does them, unless `--dry-run` is given. Services precede their callers,
/// so that no service calls an older one that did not run before.
///
/// # Errors
/// The upgrade cannot begin, or a step failed. In both cases all services run the old binary, unless the
/// error says that the way back failed, too.
pub fn upgrade(
    args: &UpgradeArgs,
    run_dir: &Path,
    machine: &Machine,
    out: &mut dyn Write,
) -> Result<(), InstallError> {
    let machine = Machine { journal_name: UPGRADE_JOURNAL, ..machine.clone() };
    let Some(binary) = args.binary.as_deref().filter(|_| !args.undo) else {
        return undo(args, &machine, out);
    };
    let absolute = |path: &Path| std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let (binary, run_dir) = (absolute(binary), &absolute(run_dir));
    let facts = upgrade_facts::survey(&binary, run_dir, &machine);
    let refusals = refusals(&facts, &machine);
    if !refusals.is_empty() {
        return Err(InstallError::Refused(refusals));
    }
    let plan = plan(&facts, binary, run_dir, &machine, args.timeout);
    let versions = format!(
        "Upgrade from {} to {}",
        facts.old_version.unwrap_or_default(),
        facts.new_version.unwrap_or_default()
    );
    print(out, &plan.text(&versions, args.dry_run))?;
    if args.dry_run {
        return Ok(());
    }
    let mut execution = Execution::begin(plan, &machine)?;
    loop {
        match execution.advance(out) {
            Ok(true) => {}
            Ok(false) => break,
            Err(error) => return Err(way_back(error)),
        }
    }
    execution.finish()?;
    print(out, "All services run the new binary. quintctl version shows them.\n")
}

/// Undoes an upgrade that was interrupted.
fn undo(args: &UpgradeArgs, machine: &Machine, out: &mut dyn Write) -> Result<(), InstallError> {
    if let Some(refusal) = not_root(machine) {
        return Err(InstallError::Refused(vec![refusal]));
    }
    let journal = Journal::read(machine)?.ok_or_else(|| InstallError::NotInterrupted(machine.journal()))?;
    print(out, &InstallPlan::undo_text(journal.begun(), args.dry_run))?;
    if args.dry_run {
        return Ok(());
    }
    execute::undo(journal, machine, out).map_err(way_back)?;
    print(out, "All services run the old binary.\n")
}

fn way_back(error: InstallError) -> InstallError {
    match error {
        InstallError::NotUndone(causes) => InstallError::NotDowngraded(causes),
        other => other,
    }
}

fn not_root(machine: &Machine) -> Option<Refusal> {
    let text = "only root can restart the services: run it with sudo".to_owned();
    (!machine.is_root).then_some(Refusal { text, code: FAILURE })
}

fn refusals(facts: &UpgradeFacts, machine: &Machine) -> Vec<Refusal> {
    let mut refusals = Vec::new();
    let mut refuse = |code, text: String| refusals.push(Refusal { text, code });
    if let Some(refusal) = not_root(machine) {
        refuse(refusal.code, refusal.text);
    }
    if let Some(journal) = &facts.journal {
        let text = format!(
            "an upgrade was interrupted ({} exists): run quintctl upgrade --undo first",
            journal.display()
        );
        refuse(FAILURE, text);
    }
    for version in [&facts.old_version, &facts.new_version] {
        if let Err(reason) = version {
            refuse(USAGE, reason.clone());
        }
    }
    if facts.is_same {
        refuse(USAGE, "the new binary is the one that is installed".to_owned());
    }
    if let Some(reason) = &facts.unhealthy {
        let text = format!(
            "the services are not healthy before the upgrade, so no failure of it could be seen: {reason}"
        );
        refuse(FAILURE, text);
    }
    for service in &facts.services {
        if let Err(reason) = &service.restarts {
            refuse(FAILURE, format!("{}: {reason}", service.name));
        }
    }
    for program in &facts.no_links {
        let text = format!(
            "{} is not a link to the binary quintlet beside it: replace and restart its service by hand, or give another --bin-dir",
            machine.bin_dir.join(program).display()
        );
        refuse(USAGE, text);
    }
    refusals
}

fn plan(
    facts: &UpgradeFacts,
    binary: PathBuf,
    run_dir: &Path,
    machine: &Machine,
    seconds: u64,
) -> InstallPlan {
    let dir = &machine.bin_dir;
    let mut steps = vec![InstallStep::Binary { source: binary, dir: dir.clone() }];
    for service in &facts.services {
        let restarts = service.restarts.clone().unwrap_or_default();
        steps.push(InstallStep::Swap(ServiceSwap {
            service: service.name.to_owned(),
            dir: dir.clone(),
            restarts,
        }));
        steps.push(InstallStep::Healthy { run_dir: run_dir.to_owned(), seconds });
    }
    steps.push(InstallStep::Promote { dir: dir.clone(), links: facts.links.clone() });
    InstallPlan { steps }
}

#[cfg(test)]
mod tests;
