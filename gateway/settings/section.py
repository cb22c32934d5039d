"""What the sections of the settings have in common."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
Count = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """A table of the file: a name that is not known is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)
