//! `quintctl install`, `quintctl uninstall` and `quintctl upgrade`: puts Quintlet in the place of a kubelet
//! or beside it, and gives the node back.
//!
//! `facts` surveys the machine and `refusals` decides whether anything would break. `plan` turns the facts
//! into `steps`, each of which can be shown, done and undone. `execute` does them, and records each in the
//! `journal` before it begins. A failed step undoes the steps before it; after a kill, `quintctl uninstall`
//! undoes what the journal has.
//!
//! [`upgrade`] replaces the binary of the running services, one after the other, with steps of the same kind
//! and a journal of its own.
//!
//! systemd and the programs of Quintlet are called as commands. All paths are below [`Machine::root`].

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

use std::io::Write;

pub use args::{InstallArgs, UninstallArgs, UpgradeArgs};
pub use error::InstallError;
pub use machine::Machine;
pub use refusal::Refusal;
pub use upgrade::upgrade;

use execute::Execution;
use journal::Journal;
use output::print;
use plan::InstallPlan;

mod args;
mod beside;
mod error;
mod execute;
mod facts;
mod files;
mod journal;
mod listeners;
mod machine;
mod output;
mod places;
mod plan;
mod refusal;
mod refusals;
mod steps;
mod swap;
mod unit_file;
mod upgrade;
mod upgrade_facts;

/// Shows the steps of an installation and does them, unless `--dry-run` is given.
///
/// # Errors
/// The installation would break something, or a step failed. In both cases the machine is as before, unless
/// the error says that the undo failed, too.
pub fn install(args: &InstallArgs, machine: &Machine, out: &mut dyn Write) -> Result<(), InstallError> {
    refuse(refusals::before_survey(&facts::basic(machine)))?;
    let plan = if args.replace_kubelet {
        let facts = facts::replace(machine)?;
        refuse(refusals::replace(&facts))?;
        plan::replace(args, machine, &facts)
    } else {
        let facts = facts::beside_kubelet(args, machine)?;
        refuse(refusals::beside(&facts))?;
        plan::beside(args, machine, &facts)
    };
    print(out, &plan.text("Steps of the installation", args.dry_run))?;
    if args.dry_run {
        return Ok(());
    }
    let mut execution = Execution::begin(plan, machine)?;
    while execution.advance(out)? {}
    print(
        out,
        "Quintlet is installed. quintctl health shows its services, quintctl uninstall undoes each step.\n",
    )
}

/// Undoes what [`install`] did, also if it was interrupted. Shows the steps first, and does none with
/// `--dry-run`.
///
/// # Errors
/// Nothing is installed, or a step cannot be undone. The remaining steps are undone nevertheless, and another
/// call tries it again.
pub fn uninstall(args: &UninstallArgs, machine: &Machine, out: &mut dyn Write) -> Result<(), InstallError> {
    let basic = facts::basic(machine);
    refuse(refusals::before_removal(&basic))?;
    let journal = Journal::read(machine)?.ok_or_else(|| InstallError::NotInstalled(machine.journal()))?;
    print(out, &InstallPlan::undo_text(journal.begun(), args.dry_run))?;
    if args.dry_run {
        return Ok(());
    }
    let kept = execute::undo(journal, machine, out)?;
    for path in kept {
        print(out, &format!("kept {}\n", path.display()))?;
    }
    print(out, "Quintlet is uninstalled.\n")
}

fn refuse(refusals: Vec<Refusal>) -> Result<(), InstallError> {
    if refusals.is_empty() { Ok(()) } else { Err(InstallError::Refused(refusals)) }
}

#[cfg(test)]
mod tests;
