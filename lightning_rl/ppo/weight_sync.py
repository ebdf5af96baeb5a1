"""New weights for the engine, and the engine's rests: calls wait at the gateway while it cannot answer them.

Invariant: every pause has a lease, so a trainer that dies in the middle does not block its agents for ever.
"""

import logging
import threading

from lightning_rl.config.schema import Config
from lightning_rl.inference.sglang import SGLangPolicy
from lightning_rl.inference.vllm.policy import VllmPolicy
from lightning_rl.ppo.models import Models
from lightning_rl.store.errors import StoreError
from lightning_rl.store.run_store import RunStore

# Longer than a large model's weights take, or an engine's start: a call that went on meanwhile would be sampled by
# weights that are half there. A trainer that dies is noticed sooner: its run is no longer heard of.
_LEASE_SECONDS = 1800.0
_log = logging.getLogger(__name__)


class WeightSync:
    """Sends the weights of `models` to the policy's engine, and lets the engine sleep where the config says so."""

    def __init__(self, config: Config, store: RunStore, models: Models) -> None:
        self._store = store
        self._models = models
        # Rollouts in flight continue over the update: to drain them would be what `sync` does.
        self._mode = "drain" if config.trainer.schedule == "sync" else "keep"
        self._pausing = threading.Lock()
        self._held = False  # calls wait for the trainer
        self._outage = self._waiting = False  # no server is left, and calls wait for one

    def publish(self, version: int) -> None:
        """Give the engine the trained weights as policy version `version`, while calls wait at the gateway."""
        self._hold(self._mode)
        self.restore(version)

    def restore(self, version: int) -> None:
        """Give the engine the weights while no call is running, and let calls through again."""
        self._models.send_weights(version)
        self._let_through(version)

    def begin_training(self) -> None:
        """The weights change from here on, until they are published."""
        if isinstance(self._models.policy, VllmPolicy):
            self._models.policy.begin_training()

    def sleep(self) -> None:
        """Free the memory of an engine on the trainer's GPU for the update."""
        policy = self._models.policy
        if isinstance(policy, VllmPolicy) and policy.sleeps:
            self._hold("drain")
            policy.sleep()

    def wake(self) -> None:
        """Wake the engine, where no update of its weights has done so; one beside this process is compared with the
        model at last, where nobody could before."""
        policy = self._models.policy
        if isinstance(policy, VllmPolicy) and policy.sleeps:
            policy.wake()
            self._let_through(None)
        if isinstance(policy, VllmPolicy | SGLangPolicy):
            policy.prove()

    def watch_outages(self) -> None:
        """Let calls wait at the gateway while all servers are away, rather than fail."""
        if isinstance(self._models.policy, VllmPolicy | SGLangPolicy):
            self._models.policy.on_outage = self._on_outage

    def _hold(self, mode: str) -> None:
        with self._pausing:
            self._held = True
        self._store.pause(self._models.policy.name, mode=mode, lease_seconds=_LEASE_SECONDS)

    def _let_through(self, version: int | None) -> None:
        with self._pausing:
            self._held = self._waiting = False
            policy = self._models.policy
            outdated = policy.replicas.urls_away if isinstance(policy, VllmPolicy | SGLangPolicy) else tuple
            self._store.resume(policy.name, version, outdated=outdated)
            self._settle()

    def _on_outage(self, outage: bool) -> None:
        with self._pausing:
            self._outage = outage
            if not self._held:  # else when the trainer lets calls through
                self._settle()

    def _settle(self) -> None:
        """Let calls wait while there is an outage, and no longer. Where that fails, it is tried when told once more."""
        name = self._models.policy.name
        try:
            if self._outage and not self._waiting:
                self._store.pause(name, deadline_seconds=0, lease_seconds=_LEASE_SECONDS)
            elif self._waiting and not self._outage:
                self._store.resume(name)
            self._waiting = self._outage
        except StoreError as error:  # calls fail, and agents are told to retry
            _log.warning("calls do not wait for the engine that starts again: %s", error)
