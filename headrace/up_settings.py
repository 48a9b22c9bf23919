"""What `headrace up` takes: the settings of what it starts, and how many of each."""

from dataclasses import dataclass

from headrace import settings


@dataclass(frozen=True, kw_only=True)
class UpSettings(
    settings.EngineSettings,
    settings.ListenSettings,
    settings.CorsSettings,
    settings.LineSettings,
    settings.LogSettings,
    settings.WebSocketSettings,
    settings.ConnectionSettings,
):
    """What `headrace up` takes."""

    workers: settings.Workers = 1
    orphan_s: settings.OrphanS = settings.ORPHAN_S
    split: settings.Split = False
    ingress: settings.Ingress = None
    streamers: settings.Streamers = None
    public_url: settings.PublicUrl = None
    data_dir: settings.DataDir = settings.DATA_DIR
    nats_url: settings.OptionalNatsUrl = None
    nats_creds: settings.NatsCreds = None
    nats_ca: settings.NatsCa = None
    grace_s: settings.GraceS = settings.GRACE_S
    config: settings.Config = settings.NO_CONFIG

    @property
    def has_keys(self) -> bool:
        """Whether clients must show a key."""
        return bool(settings.api_keys(self.config))

    @property
    def ingress_wanted(self) -> int:
        """How many ingress run where the tiers are apart."""
        return self.ingress or 1

    @property
    def streamers_wanted(self) -> int:
        """How many streamers run where the tiers are apart."""
        return self.streamers or 1
